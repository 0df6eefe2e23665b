"""Read the configuration of a model directory. Needs no torch."""

import hashlib
from pathlib import Path

from moesaic.errors import CheckpointError
from moesaic.models.architecture import (
    GroupedQueryAttention,
    LatentAttention,
    ModelConfig,
    MoE,
    Rope,
    Yarn,
)
from moesaic.models.families import read_family
from moesaic.models.fields import Fields, read_json
from moesaic.models.weight_files import header_bytes, payload_sample

__all__ = [
    "GroupedQueryAttention",
    "LatentAttention",
    "MoE",
    "ModelConfig",
    "Rope",
    "Yarn",
    "load_config",
]


def load_config(directory: Path) -> ModelConfig:
    """Read the model directory's ``config.json`` and ``generation_config.json``.

    Raises:
        CheckpointError: not a directory, no ``config.json``, a field that is missing, invalid or
            asks for what is not supported, or a damaged safetensors header.
    """
    if not directory.is_dir():
        raise CheckpointError(
            str(directory), "is not a directory; give a model directory in Hugging Face format"
        )
    path = directory / "config.json"
    fields = Fields(path.name, read_json(path))
    return read_family(fields, _eos_token_ids(directory, fields), _digest(directory))


def _eos_token_ids(directory: Path, config: Fields) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    if path.is_file():
        generation = Fields(path.name, read_json(path))
        if generation.has("eos_token_id"):
            return generation.sizes("eos_token_id")
    return config.sizes("eos_token_id")


def _digest(directory: Path) -> str:
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode() + b"\0" + header_bytes(path) + payload_sample(path))
    return digest.hexdigest()
