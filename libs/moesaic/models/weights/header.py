"""The header of a safetensors file, checked strictly. Reads no payload, needs no torch.

A file is 8 bytes of length (little-endian), a JSON header of that length and the payload; the
header names each tensor's dtype, shape and place in the payload. A header comes from outside, and
all readers must find the same numbers in it. So everything in it is checked. Each name comes once,
and the tensors cover the payload without overlaps and holes.
"""

import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.errors import CheckpointError
from moesaic.models.configuration.strict_json import parse_object, shown

MAX_HEADER_BYTES = 100_000_000
# All that the format has; what can be served is for readers to say.
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LENGTH_BYTES = 8
_MOST = 1 << 64  # what a size of the format must be below


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
    """The place of one tensor: ``nbytes`` of ``dtype``, as the format names it, row-major, from byte ``start`` of a
    file that is as its stamp says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    stamp: Stamp


class Header(NamedTuple):
    """The tensors and texts in the header of one file."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read the header of the safetensors file at ``path``, and check it against the file's size.

    Raises:
        CheckpointError: the file cannot be read, or breaks a rule of the format; names the tensor.
    """
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            announced = file.read(_LENGTH_BYTES)
            length = int.from_bytes(announced, "little")
            if stamp.size < _LENGTH_BYTES + length or length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    path.name,
                    f"is truncated or not safetensors: {stamp.size} bytes, a header of {length} bytes announced",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError.unreadable(path.name, error) from error
    if not raw.startswith(b"{"):
        raise CheckpointError(path.name, "its header: expected a JSON object, which begins with {")
    entries = parse_object(raw, path.name, "its header: ")
    metadata = _metadata(path, entries.pop(_METADATA, {}))
    base = _LENGTH_BYTES + length
    tensors = {
        name: _stored_tensor(path, name, entry, base, stamp) for name, entry in entries.items()
    }
    _require_covered(path, tensors, base, stamp.size)
    return Header(tensors, metadata)


def _metadata(path: Path, told: Any) -> dict[str, str]:
    if not isinstance(told, dict) or not all(isinstance(text, str) for text in told.values()):
        raise CheckpointError(path.name, f"its header: {_METADATA}: expected texts by name")
    return told


def _stored_tensor(path: Path, name: str, entry: Any, base: int, stamp: Stamp) -> StoredTensor:
    def wrong(problem: str) -> CheckpointError:
        return CheckpointError(path.name, problem, tensor=name)

    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise wrong(f"its header entry is malformed: expected {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise wrong(f"dtype: the format has none that is named {shown(dtype)}")
    if not _are_sizes(shape) or not _is_countable(shape):
        raise wrong(f"shape: expected sizes, got {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise wrong(f"data_offsets: expected a first byte and an end, got {shown(offsets)}")
    start, end = offsets
    if base + end > stamp.size:
        raise wrong(f"is truncated: ends at byte {base + end}, the file has {stamp.size}")
    if math.prod(shape) * bits != (end - start) * 8:
        expected = math.prod(shape) * bits / 8
        raise wrong(
            f"{dtype} {shape!s:.200} takes {expected:.16g} bytes, its place has {end - start}"
        )
    return StoredTensor(path, dtype, tuple(shape), base + start, end - start, stamp)


def _are_sizes(value: Any) -> bool:
    """Return true if a value is a list of sizes that the format can hold."""
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < _MOST for size in value
    )


def _is_countable(shape: list[int]) -> bool:
    """Return true if the format can hold every product of the first sizes, which its library computes in turn."""
    return all(count < _MOST for count in accumulate(shape, operator.mul))


def _require_covered(path: Path, tensors: Mapping[str, StoredTensor], base: int, size: int) -> None:
    """Refuse bytes of the payload that two tensors have, or none."""
    covered, before = base, ""
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start < covered:
            raise CheckpointError(path.name, f"overlaps tensor {before}", tensor=name)
        if stored.start > covered:
            hole = f"{stored.start - covered} bytes before it belong to no tensor"
            raise CheckpointError(path.name, hole, tensor=name)
        covered, before = stored.start + stored.nbytes, name
    if covered < size:
        raise CheckpointError(path.name, f"its last {size - covered} bytes belong to no tensor")
