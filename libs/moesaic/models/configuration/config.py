"""Read the configuration of a model directory. Needs no torch."""

import hashlib
from pathlib import Path

from moesaic.errors import CheckpointError
from moesaic.models.configuration.architecture import (
    GroupedQueryAttention,
    LatentAttention,
    ModelConfig,
    MoE,
    Rope,
    Yarn,
)
from moesaic.models.configuration.families import read_family
from moesaic.models.configuration.fields import Fields, read_json

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
    """Read the model directory's ``config.json`` and ``generation_config.json``, and no weights.

    Raises:
        CheckpointError: not a directory, no ``config.json``, or a field that is missing, invalid,
            not supported, or contradicts another one.
    """
    if not directory.is_dir():
        raise CheckpointError(
            str(directory), "is not a directory; give a model directory in Hugging Face format"
        )
    generation = directory / "generation_config.json"
    files = [path for path in (directory / "config.json", generation) if path.exists()]
    fields = Fields("config.json", read_json(directory / "config.json"))
    ends = Fields(generation.name, read_json(generation) if generation in files else {})
    return read_family(fields, ends, _digest_of(files))


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
