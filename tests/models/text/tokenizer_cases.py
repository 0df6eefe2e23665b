"""The kinds of tokenizers of published models, and the spellings of their files, as model directories."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The cats sat, didn't they? It's 1234567 o'clock.",
    "Größe, naïve façade; 漢字とかな, 한국어, emoji 👩‍👩‍👧 and 🏳️‍🌈! 世界 你好 Ελληνικά кошка",
    "def f(x):\n    return {'a': x ** 2}\n\n\n\tend  of   text",
    "hello world this is a story about a house and the cats who sat in it",
]
TEXTS = (
    "",
    " ",
    "  ",
    "\n",
    "The cats sat.",
    " The cats sat.",
    "the cats  sat   .  ",
    "It's 12345 o'clock, didn't they?",
    "世界 你好",
    "a世b\U00012345c",
    "e\u0301 caf\u00e9 A\u030a \ufb01ne \uff21\uff22",
    "👩‍👩‍👧 and 🏳️‍🌈",
    "def f(x):\n    return {'a': x ** 2}\n\n\n\tend",
    "▁The ▁ cat",
    "Ġhello Ċ",
    "<s>The cats</s> sat",
    "<s> <s></s>x</s> ",
    "a<|user|>The cats<|end|> sat",
    "a <|user|> \n the <|end|>\tx",
    "<|USER|><|end|>",
    "x<tool>the</tool>y",
    "x <tool> the </tool> y",
    "abctool tool toolbox tool",
    "<0x41><0xE4>\u0000\ufffd",
    "<|user|><|user|>",
    "<unk> unk \U0010fffd",
    "ÉCOLE école",
)
GPT2 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _byte_level(*before: pre_tokenizers.PreTokenizer, **flags: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(**flags))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not before)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_]) if before else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def qwen() -> tokenizers.Tokenizer:
    """Bytes, behind a regular expression and NFC."""
    tokenizer = _byte_level(_split(GPT2))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def o200k() -> tokenizers.Tokenizer:
    """Bytes, as gpt-oss splits texts, whole words first."""
    return _byte_level(_split(O200K), ignore_merges=True)


def deepseek() -> tokenizers.Tokenizer:
    """Bytes, behind several splits, with a first token by template."""
    tokenizer = _byte_level(
        _split(r"\p{N}{1,3}"),
        _split(r"[\u4e00-\u9fa5\u3040-\u30ff]+"),
        _split(
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    return tokenizer


def digits() -> tokenizers.Tokenizer:
    """Bytes, each digit by itself, a space before the first word, both ends by template."""
    tokenizer = _byte_level(pre_tokenizers.Digits(individual_digits=True), _split(r"\s?\p{L}+"))
    ends = [(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    return tokenizer


def _pieces(**flags: Any) -> models.BPE:
    """The BPE model of Llama and Mixtral, with byte fallback."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    texts = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(texts, BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], "世", "é"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(pair) for pair in model["merges"]]
    return models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True, **flags
    )


def _llama_decoder(*, strips: bool = True) -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(parts + [decoders.Strip(content=" ", left=1)] * strips)


def mixtral() -> tokenizers.Tokenizer:
    """Sentencepiece BPE with normalizers, as in files of Llama 2 and Mixtral."""
    tokenizer = tokenizers.Tokenizer(_pieces())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = _llama_decoder()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """Sentencepiece BPE with a pre-tokenizer, as in newer files."""
    tokenizer = tokenizers.Tokenizer(_pieces())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = _llama_decoder(strips=scheme != "never")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unigram(scheme: str) -> tokenizers.Tokenizer:
    """Unigram with the decoder ``Metaspace``."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = UnigramTrainer(
        vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def prefixed() -> tokenizers.Tokenizer:
    """Bytes, with a blank before the first word, and offsets without blanks."""
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def lowercase() -> tokenizers.Tokenizer:
    """BPE of texts without capitals and accents."""
    tokenizer = unigram("first")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    return tokenizer


def unigram_bytes() -> tokenizers.Tokenizer:
    """Unigram with byte fallback."""
    scored = json.loads(tokenizer_json("unigram-always"))["model"]["vocab"]
    vocab = [*scored, *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([(piece, score) for piece, score in vocab], unk_id=0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = _llama_decoder()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "qwen": qwen,
    "o200k": o200k,
    "deepseek": deepseek,
    "digits": digits,
    "mixtral": mixtral,
    "prefixed": prefixed,
    "lowercase": lowercase,
    "unigram-bytes": unigram_bytes,
    **{f"metaspace-{s}": partial(metaspace, s) for s in ("always", "first", "never")},
    **{f"unigram-{s}": partial(unigram, s) for s in ("always", "first", "never")},
}


@cache
def tokenizer_json(kind: str) -> str:
    """``tokenizer.json`` of one kind."""
    return KINDS[kind]().to_str()


Files = dict[str, Any]


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Spell a token as ``added_tokens_decoder`` does."""
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """Spell a token as older files do for named tokens."""
    return {"__type": "AddedToken", **token(content, **flags)}


TOOLS = {"900": token("<tool>", normalized=True), "901": token("</tool>")}
CONFIG, MAP, MORE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPELLINGS: dict[str, Files] = {
    "alone": {},
    "named": {CONFIG: NAMED},
    "typed": {CONFIG: {"bos_token": typed("<s>", special=True), "eos_token": typed("<|end|>")}},
    "nulls": {CONFIG: {"bos_token": None, "eos_token": "<|end|>", "add_bos_token": False}},
    "adds both ends": {CONFIG: {**NAMED, "add_bos_token": True, "add_eos_token": True}},
    "in the map": {CONFIG: {}, MAP: NAMED},
    "map alone": {MAP: {**NAMED, "eos_token": token("<|end|>")}},
    "map over configuration": {
        CONFIG: NAMED,
        MAP: {"eos_token": "<|end|>", "bos_token": "<|user|>"},
    },
    "map beside a decoder": {
        CONFIG: {"eos_token": "</s>", "added_tokens_decoder": TOOLS},
        MAP: {"bos_token": "<s>", "eos_token": "<|end|>"},
    },
    "map of flags": {CONFIG: {}, MAP: {"eos_token": token("<|end|>", lstrip=True, rstrip=True)}},
    "map takes a name back": {CONFIG: NAMED, MAP: {"bos_token": None}},
    "new names": {CONFIG: {**NAMED, "eos_token": "<|eot|>", "pad_token": "<tool>"}},
    "decoder": {CONFIG: {**NAMED, "added_tokens_decoder": TOOLS}},
    "decoder, gaps": {
        CONFIG: {"added_tokens_decoder": {"5000": token("<tool>"), "700": token("tool")}}
    },
    "decoder of strips": {
        CONFIG: {
            "added_tokens_decoder": {
                "900": token("<tool>", lstrip=True, special=True),
                "901": token("</tool>", rstrip=True, special=True),
                "902": token("tool", single_word=True, normalized=True),
            }
        }
    },
    "decoder over flags": {
        CONFIG: {
            "added_tokens_decoder": {
                "3": token("<|user|>", lstrip=True, rstrip=True),
                "4": token("<|end|>", special=True, rstrip=True),
            }
        }
    },
    "decoder of words": {
        CONFIG: {"added_tokens_decoder": {"900": token("cats", special=True), "901": token("é")}}
    },
    "decoder, empty": {CONFIG: {**NAMED, "added_tokens_decoder": {}}, MAP: {"pad_token": "<pad>"}},
    "named in a decoder": {
        CONFIG: {"eos_token": "<tool>", "added_tokens_decoder": TOOLS, "pad_token": "</tool>"}
    },
    "added": {MORE: {"<tool>": 900, "</tool>": 901}},
    "added and named": {
        CONFIG: {"eos_token": "<tool>", "additional_special_tokens": ["</tool>"]},
        MORE: {"</tool>": 900, "<tool>": 901, "tool": 902},
    },
    "added beside a decoder": {CONFIG: {"added_tokens_decoder": {}}, MORE: {"<tool>": 900}},
    "additional": {CONFIG: {**NAMED, "additional_special_tokens": ["<tool>", "</tool>"]}},
    "additional, typed": {CONFIG: {"additional_special_tokens": [typed("<tool>", lstrip=True)]}},
    "additional in the map": {MAP: {"additional_special_tokens": ["<tool>", "</tool>"]}},
    "extra": {CONFIG: {"extra_special_tokens": ["<tool>", "<|user|>"]}},
    "extra and additional": {
        CONFIG: {"extra_special_tokens": ["<tool>"], "additional_special_tokens": ["</tool>"]}
    },
    "extra by name and additional": {
        CONFIG: {
            "extra_special_tokens": {"x_token": "<tool>"},
            "additional_special_tokens": ["</tool>"],
        }
    },
    "one text, two flags": {
        CONFIG: {
            "eos_token": "<tool>",
            "cls_token": typed("<tool>", lstrip=True),
            "pad_token": typed("cats", single_word=True),
            "sep_token": "cats",
        }
    },
    "extra in both": {
        CONFIG: {"extra_special_tokens": ["<tool>"]},
        MAP: {"extra_special_tokens": ["</tool>", "<tool>"]},
    },
    "extra by name": {
        CONFIG: {"extra_special_tokens": {"tool_token": "<tool>", "image": "</tool>"}}
    },
    "extra by name in the map": {MAP: {"extra_special_tokens": {"tool_token": "<tool>"}}},
    "names of its own": {
        CONFIG: {"tool_token": "<tool>", "end_token": typed("</tool>", rstrip=True)}
    },
    "names of its own in the map": {CONFIG: NAMED, MAP: {"tool_token": "<tool>", "x": "y"}},
    "special as text": {CONFIG: {**NAMED, "split_special_tokens": True}},
    "other fields": {
        CONFIG: {**NAMED, "add_prefix_space": True, "legacy": True, "model_max_length": 7}
    },
    "extra by name in both": {
        CONFIG: {"extra_special_tokens": {"a_token": "<tool>"}},
        MAP: {"extra_special_tokens": {"b_token": "</tool>", "a_token": "tool"}},
    },
    "model specific": {
        CONFIG: {"model_specific_special_tokens": {"a_token": "<tool>"}, "eos_token": "<|end|>"}
    },
    "blanks and words of Unicode": {
        CONFIG: {
            "added_tokens_decoder": {
                "900": token("  "),
                "901": token("\n", special=True),
                "902": token("世", special=True),
                "903": token("e\u0301", normalized=True),
            }
        }
    },
    "cleaned, BPE too": {
        CONFIG: {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
        }
    },
    "cleaned": {CONFIG: {**NAMED, "clean_up_tokenization_spaces": True}},
}


def write(directory: Path, kind: str, files: Files, model: Files | None = None) -> Path:
    """Write a model directory without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(kind))
    for name, content in {
        "config.json": {"model_type": "mixtral"} | (model or {}),
        **files,
    }.items():
        (directory / name).write_text(json.dumps(content))
    return directory
