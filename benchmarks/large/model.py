"""The model: the published configuration of Qwen3-30B-A3B, with as many layers as are asked for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.models import QWEN3_30B, TOKENIZER_FILES
from benchmarks.common.suite import DEMO
from benchmarks.engine.gguf import CONTROL, NORMAL, architecture_of
from benchmarks.large.files import write_pair

CONFIG: dict[str, Any] = {
    **QWEN3_30B,
    "dtype": "bfloat16",
}
CHECKPOINT, GGUF = "checkpoint", "model.gguf"


def write_model(directory: Path, layers: int, told: Callable[[str], None]) -> None:
    """Write the checkpoint, and the same as a GGUF file, unless they are there with as many layers."""
    done = directory / "layers"
    if done.exists() and done.read_text() == str(layers):
        return
    done.unlink(missing_ok=True)
    config, checkpoint = {**CONFIG, "num_hidden_layers": layers}, directory / CHECKPOINT
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    metadata = {**architecture_of(config), **_vocabulary(config["vocab_size"])}
    write_pair(config, metadata, checkpoint, directory / GGUF, told)
    # Prompts are token ids.
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, checkpoint)
    done.write_text(str(layers))


def _vocabulary(size: int) -> dict[str, Any]:
    """Describe a vocabulary of made-up tokens, of which bytes and the last are told apart."""
    tokens = [f"t{i}" for i in range(size - 1)] + ["<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (size - 1) + [CONTROL],
        "tokenizer.ggml.merges": ["t 0"],
        "tokenizer.ggml.bos_token_id": size - 1,
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
