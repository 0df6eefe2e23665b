"""A checkpoint of random weights in the shape of Qwen3-MoE, with its real vocabulary and number of experts."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.common.models import QWEN3_30B, write_model

SHAPE: dict[str, Any] = {
    **QWEN3_30B,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 4096,
    "eos_token_id": QWEN3_30B["vocab_size"] - 1,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(directory: Path, **changes: Any) -> None:
    """Write configuration, tokenizer and bfloat16 weights into ``directory``; ``changes`` are of ``SHAPE``."""
    shape = {**SHAPE, **changes}
    write_model(directory, shape)
    _write_tokenizer(directory, shape["vocab_size"])


def _write_tokenizer(directory: Path, vocab: int) -> None:
    """Write a tokenizer of all bytes and of as many further pieces as the vocabulary has."""
    pieces = [*ByteLevel.alphabet(), *(f"piece{number}" for number in range(vocab))][:vocab]
    tokenizer = Tokenizer(
        BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
