"""Whole safetensors files of our own, read with the format's library, which overlooks some damage."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.weights.header import read_header


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors of these ``names``, or all, as they are stored.

    Raises:
        CheckpointError: the file cannot be read, breaks a rule of the format, or lacks one of them.
    """
    header = read_header(path)
    try:
        with safe_open(path, "pt") as file:
            wanted = header.tensors if names is None else names
            return {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(path.name, f"cannot be read: {error}") from error
