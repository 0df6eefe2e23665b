"""Small model directories for the tests of this room."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.parity.cases import CASES, build_reference
from tests.kernels.conftest import launches

__all__ = ["launches"]

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Größe, naïve façade; 漢字とかな, 한국어, emoji 👩‍👩‍👧 and 🏳️‍🌈!",
    "def f(x):\n    return {'a': x ** 2}\n",
]


@pytest.fixture
def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """As Qwen and DeepSeek have it: pieces of UTF-8 bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.fixture
def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """As Mixtral has it: pieces of characters, single bytes for what has no piece, a first space that goes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é漢", "▁t", "he", "▁the"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A small Qwen3-MoE in several shards."""
    case = next(case for case in CASES if case.family == "qwen3_moe")
    build_reference(case, tmp_path, max_shard_size="30KB")
    return tmp_path


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a ``config.json`` that is valid but for the given fields; ``...`` leaves a field out."""

    def write(base: dict[str, Any], **changes: Any) -> Path:
        fields = {k: v for k, v in {**base, **changes}.items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write
