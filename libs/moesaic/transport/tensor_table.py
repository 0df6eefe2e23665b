"""Tensors as the header of a frame describes them, and as its payload holds them."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.errors import FrameError, InvalidInput

MAX_TENSORS = 4
_ALIGNMENT = 64  # of each tensor in the payload, for vector loads
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8)
_DTYPE_OF_CODE = dict(enumerate(_DTYPES, start=1))
CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
NUMBERS = 1 << 20  # of parcels of one connection, before they begin again
_PARCEL, _NUMBER = 1 << 8, 12  # bits of the number that tells a dtype


@dataclass(slots=True)  # frozen, each would take a microsecond
class TableEntry:
    """A tensor as the header describes it."""

    dtype: torch.dtype
    rows: int
    cols: int
    parcel: int | None  # its number; None: it is in the payload

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.rows * self.cols * self.dtype.itemsize


def read_table(
    num_tensors: int, table: list[int], max_rows: int, max_cols: int
) -> list[TableEntry]:
    """Read the part of a header that describes the tensors, three numbers each.

    Raises:
        FrameError: there are too many, a dtype is unknown, or a shape is out of bounds.
    """
    if num_tensors > MAX_TENSORS:
        raise FrameError("num_tensors", f"at most {MAX_TENSORS}, got {num_tensors}")
    entries = []
    for idx in range(num_tensors):
        code, rows, cols = table[3 * idx : 3 * idx + 3]
        dtype = _DTYPE_OF_CODE.get(code % (1 << _NUMBER) - _PARCEL if code & _PARCEL else code)
        if dtype is None:
            raise FrameError(f"tensors[{idx}].dtype", f"unknown code {code}")
        if rows > max_rows or cols > max_cols:
            raise FrameError(
                f"tensors[{idx}].shape",
                f"at most {max_rows} x {max_cols}, got {rows} x {cols}",
            )
        entries.append(TableEntry(dtype, rows, cols, code >> _NUMBER if code & _PARCEL else None))
    return entries


def parcels_of(entries: list[TableEntry]) -> tuple[int, int]:
    """Count the parcels among the tensors.

    Returns:
        Their number, and the index of the first.

    Raises:
        FrameError: another tensor is before one of them, or they are not numbered in a row.
    """
    numbers = [entry.parcel for entry in entries if entry.parcel is not None]
    if not numbers:
        return 0, 0
    first = numbers[0]
    expected = [(first + idx) % NUMBERS for idx in range(len(numbers))]
    if [entry.parcel for entry in entries[: len(numbers)]] != expected:
        raise FrameError(
            "tensors", "tensors outside the frame must be the first, with consecutive numbers"
        )
    return len(numbers), first


def read_tensors(
    message: bytearray, start: int, entries: list[TableEntry]
) -> tuple[list[Tensor], int]:
    """Find tensors in a message from byte ``start`` on; they share its memory.

    Returns:
        The tensors, and the offset of the byte after them.

    Raises:
        FrameError: the message is too short.
    """
    tensors = []
    for idx, entry in enumerate(entries):
        dtype, rows, cols = entry.dtype, entry.rows, entry.cols
        end = start + entry.nbytes
        if end > len(message):
            raise FrameError(f"tensors[{idx}]", f"ends at byte {end} of {len(message)}")
        tensors.append(
            torch.frombuffer(message, dtype=dtype, count=rows * cols, offset=start).view(rows, cols)
            if rows * cols
            else torch.empty(rows, cols, dtype=dtype)
        )
        start = end + padding_of(end)
    return tensors, start


def table_of(tensors: list[Tensor], parcels: int, first_parcel: int) -> list[int]:
    """Describe tensors for a header; the first ``parcels`` travel apart, numbered from ``first_parcel``.

    Raises:
        InvalidInput: there are too many, or one is not 2-D of a supported dtype.
    """
    if len(tensors) > MAX_TENSORS:
        raise InvalidInput("tensors", f"a frame holds at most {MAX_TENSORS}, got {len(tensors)}")
    table = []
    for idx, tensor in enumerate(tensors):
        if tensor.dim() != 2 or tensor.dtype not in CODE_OF_DTYPE:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise InvalidInput(
                f"tensors[{idx}]", f"must be 2-D of f32, f16, bf16, i32, i64 or i8, got {found}"
            )
        code = CODE_OF_DTYPE[tensor.dtype]
        if idx < parcels:
            code |= _PARCEL | (first_parcel + idx) % NUMBERS << _NUMBER
        table += [code, *tensor.shape]
    return table + [0] * (3 * (MAX_TENSORS - len(tensors)))


def memory_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Give the tensor's own memory, or a copy of it on the host; row-major."""
    # Numpy has no such type.
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.contiguous().numpy(force=True)


def padding_of(offset: int) -> int:
    """Bytes from ``offset`` to where the next tensor begins."""
    return -offset % _ALIGNMENT
