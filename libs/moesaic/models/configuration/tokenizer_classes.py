"""Classes of tokenizers that replace parts of ``tokenizer.json``.

For these, ``transformers`` 5 takes only the vocabulary, the merges and the post-processor from the file.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

_END = "<|endoftext|>"
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By ``model_type``, if no file names a class. The other families have no class, or one that changes nothing.
_OF_FAMILIES = {
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "olmoe": "GPTNeoXTokenizer",
}
# Families whose tokenizers are those of ``tokenizer.json``, also if a file names a class.
_AS_THE_FILE_SAYS = frozenset(
    ("ernie4_5_moe", "glm4_moe", "granitemoe", "granitemoeshared", "minimax_m2", "mixtral")
)


@dataclass(frozen=True)
class TokenizerClass:
    """The parts of one class."""

    named: Mapping[str, str]  # special tokens if no file names them
    parts: Callable[[Json], dict[str, Any]]  # of ``tokenizer.json``, by ``tokenizer_config.json``
    byte_level: bool = True
    renews_special: bool = False  # flags of special tokens in files have no effect

    def applied(self, base: Json, values: Json) -> dict[str, Any]:
        """Return ``tokenizer.json`` with the parts of this class."""
        parts = self.parts(values)
        model = {
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            **parts.pop("model", {}),
        }
        flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
        plain = {"type": "BPE", "dropout": None, "unk_token": None, **flags, **model}
        read = {name: base["model"][name] for name in ("vocab", "merges")}
        return {**base, "added_tokens": [], "normalizer": None, **parts, "model": {**plain, **read}}


def class_of(base: Json, values: Json, config: Json) -> TokenizerClass | None:
    """Find the class of a tokenizer, if it changes anything.

    A class of byte-level tokenizers leaves a sentencepiece tokenizer unchanged, and the reverse: its parts do not fit.

    Args:
        base: ``tokenizer.json``.
        values: ``tokenizer_config.json``.
        config: ``config.json``.
    """
    family = str(config.get("model_type"))
    declared = values.get("tokenizer_class") or config.get("tokenizer_class")
    name = declared if isinstance(declared, str) else _OF_FAMILIES.get(family, "")
    found = _CLASSES.get(name.removesuffix("Fast"))
    model = base.get("model")
    if found is None or family in _AS_THE_FILE_SAYS or not isinstance(model, dict):
        return None
    parts = json.dumps([base.get("pre_tokenizer"), base.get("decoder")])
    fits = found.byte_level == ('"ByteLevel"' in parts)
    return found if fits and {"vocab", "merges"} <= model.keys() else None


def _qwen(values: Json) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False}
    bytes_ = {**_byte_level(values), "use_regex": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "decoder": _BYTES,
    }


def _gpt2(values: Json) -> dict[str, Any]:
    return {"pre_tokenizer": _byte_level(values), "decoder": _BYTES}


def _neox(values: Json) -> dict[str, Any]:
    return {**_gpt2(values), "normalizer": {"type": "NFC"}, "post_processor": None}


def _llama(values: Json) -> dict[str, Any]:
    prefixed = values.get("add_prefix_space") is not False
    scheme = ("always" if values.get("legacy") else "first") if prefixed else "never"
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "fuse_unk": True,
            "byte_fallback": True,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
        },
    }


def _byte_level(values: Json) -> dict[str, Any]:
    return {**_BYTES, "add_prefix_space": values.get("add_prefix_space") is True}


_CLASSES = {
    "Qwen2Tokenizer": TokenizerClass(
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END), _qwen, renews_special=True
    ),
    "GPT2Tokenizer": TokenizerClass(
        dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END), _gpt2
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        {
            **dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
            "pad_token": "<|padding|>",
        },
        _neox,
    ),
    "LlamaTokenizer": TokenizerClass(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _llama, byte_level=False
    ),
}
