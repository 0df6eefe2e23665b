"""The safetensors files of a model directory, and what their headers say. Reads no payload, needs no torch.

A file is 8 bytes of length (little-endian), a JSON header of that length and the payload; the
header names each tensor's dtype, shape and place in the payload. A header comes from outside, so
everything in it is checked.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moesaic.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
# What can be served: numbers, and codes.
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}
_COMPARED_BYTES = 1 << 22
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Stamp(NamedTuple):
    """Facts that tell one state of a file from another without reading it."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """Take the stamp of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor: ``nbytes`` of ``dtype`` (of ``DTYPE_BYTES``, or not to be read), row-major, from byte
    ``start`` of a file that is as its stamp says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    stamp: Stamp


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    """List every tensor of the model in ``directory``, by name.

    Raises:
        CheckpointError: no safetensors, a damaged header, a shard that the index names is not
            there, or a tensor is not in the shard that the index names, or only there.
    """
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        return _read_header(_single_file(directory))
    weight_map = read_index(index_path)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        first = next(name for name, of in weight_map.items() if of == file)
        if not (directory / file).is_file():
            raise CheckpointError(file, f"is named by {INDEX_FILE} but is not there", tensor=first)
        header = _read_header(directory / file)
        for name in (name for name, of in weight_map.items() if of == file):
            if name not in header:
                raise CheckpointError(
                    file, f"{INDEX_FILE} says it is here, but it is not", tensor=name
                )
        for name, stored in header.items():
            if weight_map.get(name) != file:
                raise CheckpointError(
                    file, f"is here, but {INDEX_FILE} does not say so", tensor=name
                )
            tensors[name] = stored
    return tensors


def header_bytes(path: Path) -> bytes:
    """Read the raw JSON header of the safetensors file at ``path``.

    Raises:
        CheckpointError: the file is too short, or the header's length cannot be right.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                path.name,
                f"is truncated or not safetensors: {size} bytes, a header of {length} bytes announced",
            )
        return file.read(length)


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
        raise CheckpointError(one.file.name, f"cannot be read: {error}") from error
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
        raise CheckpointError(tensor.file.name, f"cannot be read: {error}") from error


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
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        valid = all(
            isinstance(name, str) and isinstance(file, str) for name, file in weight_map.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            path.name, f"expected a JSON object with weight_map ({error})"
        ) from error
    for file in weight_map.values() if valid else ():
        if Path(file).name != file:  # a path could lead out of the directory
            raise CheckpointError(path.name, f"weight_map: expected file names, got {file!r}")
    if not valid or not weight_map:
        raise CheckpointError(path.name, "weight_map: expected tensor names and file names")
    return dict(weight_map)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    raw = header_bytes(path)
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(path.name, f"its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(path.name, "its header is not a JSON object")
    base, stamp = 8 + len(raw), Stamp.of(path.stat())
    return {
        name: _stored_tensor(path, name, entry, base, stamp)
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _stored_tensor(
    path: Path, name: str, entry: Mapping[str, object], base: int, stamp: Stamp
) -> StoredTensor:
    try:
        dtype, shape, (start, end) = (
            str(entry["dtype"]),
            _sizes(entry["shape"]),
            _sizes(entry["data_offsets"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path.name, "its header entry is malformed", tensor=name) from error
    if base + end > stamp.size:
        raise CheckpointError(
            path.name,
            f"is truncated: ends at byte {base + end}, the file has {stamp.size}",
            tensor=name,
        )
    expected = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
    if dtype in DTYPE_BYTES and end - start != expected:
        raise CheckpointError(
            path.name,
            f"{dtype} {list(shape)} takes {expected} bytes, its place has {end - start}",
            tensor=name,
        )
    return StoredTensor(path, dtype, shape, base + start, end - start, stamp)


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise TypeError(f"expected sizes, got {value!r}")
    return tuple(value)
