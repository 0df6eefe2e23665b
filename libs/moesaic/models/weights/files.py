"""The safetensors files of a model directory, and the tensors that they hold together. Needs no torch."""

from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError
from moesaic.models.configuration.fields import read_json
from moesaic.models.configuration.strict_json import shown
from moesaic.models.weights.header import StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_COMPARED_BYTES = 1 << 22
_MAX_NAME_BYTES = 255  # of a file, on all usual file systems
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    """List every tensor of the model in ``directory``, by name.

    Raises:
        CheckpointError: there are no safetensors, a header is damaged, a shard is missing, or the
            index and the shards list different tensors.
    """
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        return read_header(_single_file(directory)).tensors
    weight_map = read_index(index_path)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        first = next(name for name, of in weight_map.items() if of == file)
        if not (directory / file).is_file():
            raise CheckpointError(file, f"is named by {INDEX_FILE} but is not there", tensor=first)
        header = read_header(directory / file).tensors
        for name in (name for name, of in weight_map.items() if of == file):
            if name not in header:
                raise CheckpointError(
                    file,
                    f"is named by {INDEX_FILE} for this tensor, but does not contain it",
                    tensor=name,
                )
        for name, stored in header.items():
            if weight_map.get(name) != file:
                raise CheckpointError(
                    file,
                    f"contains this tensor, but {INDEX_FILE} does not list it here",
                    tensor=name,
                )
            tensors[name] = stored
    return tensors


def same_payload(one: StoredTensor, other: StoredTensor) -> bool:
    """Return true if two tensors are stored alike, byte for byte.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with one.file.open("rb") as mine, other.file.open("rb") as theirs:
            mine.seek(one.start)
            theirs.seek(other.start)
            for done in range(0, one.nbytes, _COMPARED_BYTES):
                length = min(_COMPARED_BYTES, one.nbytes - done)
                if mine.read(length) != theirs.read(length):
                    return False
    except OSError as error:
        raise CheckpointError.unreadable(one.file.name, error) from error
    return True


def all_zeros(tensor: StoredTensor) -> bool:
    """Return true if a tensor, small enough to be read at once, is nothing but zeros.

    Raises:
        CheckpointError: its file cannot be read.
    """
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            return not file.read(tensor.nbytes).strip(b"\0")
    except OSError as error:
        raise CheckpointError.unreadable(tensor.file.name, error) from error


def _single_file(directory: Path) -> Path:
    path = directory / SINGLE_FILE
    if path.is_file():
        return path
    pickled = sorted(found.name for pattern in _PICKLED for found in directory.glob(pattern))
    if pickled:
        raise CheckpointError(
            pickled[0],
            "pickled weights can run code and are never read; convert them to safetensors, for example with"
            " save_pretrained(..., safe_serialization=True)",
        )
    raise CheckpointError(str(directory), f"has neither {SINGLE_FILE} nor {INDEX_FILE}")


def read_index(path: Path) -> dict[str, str]:
    """Read the index at ``path``: the name of its file for each tensor.

    Raises:
        CheckpointError: it does not hold that.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path.name, "weight_map: expected tensor names and file names")
    for tensor, file in weight_map.items():
        if not _is_file_name(file):
            raise CheckpointError(
                path.name, f"weight_map: expected a file name, got {shown(file)}", tensor=tensor
            )
    return dict(weight_map)


def _is_file_name(value: Any) -> bool:
    """Return true if a value names a file of the same directory; a path could lead out of it."""
    if not isinstance(value, str) or value in ("", ".", ".."):
        return False
    return len(value.encode()) <= _MAX_NAME_BYTES and not {"/", "\0"} & set(value)
