"""Reads the payload of a tensor, a piece at a time: it is checked and converted while it is in the core's cache."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moesaic.errors import CheckpointError, PassingCheckpointError
from moesaic.kernels.packed_matrix import ROW_DTYPES
from moesaic.models.weights.header import Stamp, StoredTensor
from moesaic.native.library import computes_on, lib
from moesaic.telemetry.loading import LoadProgress

PIECE_BYTES = 1 << 18  # stays in a core's cache
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODE_DTYPES = {
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E8M0"), torch.uint8),
    "I32": torch.int32,
    "I64": torch.int64,
}

_mine = threading.local()


def fill(name: str, stored: StoredTensor, start: int, into: Tensor, progress: LoadProgress) -> None:
    """Fill ``into``, contiguous on the CPU, with as many numbers from byte ``start`` of the file of ``stored``.

    Beside ``into`` it takes ``PIECE_BYTES`` of memory a thread.

    Raises:
        CheckpointError: the file has changed or cannot be read, or some number is not finite, or not as
            ``into.dtype``.
    """
    dtype, flat = STORED_DTYPES[stored.dtype], into.view(-1)
    bad, each = 0, PIECE_BYTES // dtype.itemsize
    with _opened(name, stored) as descriptor:
        for first in range(0, len(flat), each):
            part = flat[first : first + each]
            piece = part if part.dtype == dtype else _scratch(dtype)[: len(part)]
            _read(descriptor, name, stored, start + first * dtype.itemsize, piece)
            bad += _take(piece, part)
            progress.add(piece.nbytes)
    if bad:
        raise CheckpointError(
            stored.file.name,
            f"{bad} of {len(flat)} weights are infinite or NaN as {into.dtype}: the "
            "file is damaged or not made for this dtype",
            tensor=name,
        )


def fill_codes(
    name: str, stored: StoredTensor, start: int, into: Tensor, progress: LoadProgress
) -> None:
    """Fill ``into``, contiguous on the CPU, bit for bit; raises as ``fill`` does if the file cannot be read."""
    flat = into.view(-1).view(torch.uint8)
    with _opened(name, stored) as descriptor:
        for first in range(0, len(flat), PIECE_BYTES):
            piece = flat[first : first + PIECE_BYTES]
            _read(descriptor, name, stored, start + first, piece)
            progress.add(piece.nbytes)


@contextmanager
def _opened(name: str, stored: StoredTensor) -> Iterator[int]:
    """Open the file of ``stored`` for the length of the block, and raise what goes wrong as ``CheckpointError``."""
    try:
        with stored.file.open("rb", buffering=0) as file:
            if Stamp.of(os.fstat(file.fileno())) != stored.stamp:
                raise _changed(name, stored)
            yield file.fileno()
    except OSError as error:
        raise CheckpointError.unreadable(stored.file.name, error, tensor=name) from error


def _changed(name: str, stored: StoredTensor) -> CheckpointError:
    fix = "has changed while in use: start this process anew"
    return PassingCheckpointError(stored.file.name, fix, tensor=name)


def _read(descriptor: int, name: str, stored: StoredTensor, start: int, piece: Tensor) -> None:
    buffer = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer
    filled = 0
    while filled < buffer.nbytes:
        count = os.preadv(descriptor, [buffer[filled:]], start + filled)
        if not count:
            # It has become shorter since it was opened.
            raise _changed(name, stored)
        filled += count


def _take(piece: Tensor, part: Tensor) -> int:
    """Convert a piece to its part of the tensor.

    Returns:
        Numbers that are not finite there.
    """
    # Then these are the same before and after.
    exact = part.dtype in (piece.dtype, torch.float32)
    if not exact or not computes_on(part.device):
        if part is not piece:
            part.copy_(piece)
        return int((~part.isfinite()).sum())
    here = {"weights": piece.data_ptr(), "kind": ROW_DTYPES[piece.dtype], "count": len(piece)}
    if part is not piece:
        lib().widen_stored(**here, to=part.data_ptr())
    return int(lib().count_not_finite(**here))


def _scratch(dtype: torch.dtype) -> Tensor:
    """Memory for a piece, this thread's until it asks again."""
    kept: Tensor | None = getattr(_mine, "piece", None)
    if kept is None:
        kept = _mine.piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    return kept.view(dtype)
