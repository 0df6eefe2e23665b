"""Rows and sums as they travel between workers: in their own dtype, or as bytes. Pure.

Packed rows are int8 ``[T, H + 4]``: the last four bytes of a row are its scale, a float32. A number is
its byte times the scale, which is the row's largest magnitude over 127.

==================== ========= =================================================================
row                  scale     comes back as
==================== ========= =================================================================
finite               > 0       its numbers, off by at most half a scale (and float32's rounding)
below 1.5e-36        0         zeros
one not finite in it NaN       NaN, all of it: it stays visible, and other rows do not change
==================== ========= =================================================================

Rows are rounded half to even. The C functions give the same bits as torch does here.
"""

import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.messages.wire import WireDtype
from moesaic.native.library import lib, library, usable

ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

SCALE_BYTES = 4
_LARGEST = 127


def to_wire(rows: Tensor, wire: WireDtype) -> Tensor:
    """Bring ``[T, H]`` into the form in which rows are sent."""
    return pack_rows(rows) if wire == "int8" else rows


def from_wire(rows: Tensor) -> Tensor:
    """Read what ``to_wire`` made: packed rows as float32, others as they are."""
    return unpack_rows(rows) if rows.dtype == torch.int8 else rows


def like_rows(sums: Tensor, rows: Tensor) -> Tensor:
    """Bring ``sums``, float32 ``[T or 0, H]``, into the form of the ``rows`` that were sent."""
    return pack_rows(sums) if rows.dtype == torch.int8 else sums.to(rows.dtype)


def hidden_size_of(rows: Tensor) -> int:
    """The width ``H`` of rows in either form."""
    return rows.shape[1] - SCALE_BYTES if rows.dtype == torch.int8 else rows.shape[1]


def row_bytes(hidden_size: int, dtype: torch.dtype, wire: WireDtype) -> int:
    """Bytes of one row of ``dtype`` as it is sent, and of its sum."""
    return hidden_size + SCALE_BYTES if wire == "int8" else hidden_size * dtype.itemsize


def check_rows(rows: Tensor, hidden_size: int) -> None:
    """Refuse what are no rows of this width; raises ``InvalidInput``."""
    if rows.dtype not in (*ROW_DTYPES, torch.int8):
        raise InvalidInput(
            "frame.tensors[0]", f"must be float32, float16, bfloat16 or int8, got {rows.dtype}"
        )
    if hidden_size_of(rows) != hidden_size:
        raise InvalidInput(
            "frame.tensors", f"hidden size is {hidden_size}, got {hidden_size_of(rows)}"
        )


def is_sum_of(part: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if ``part`` can be part of the sum for ``rows``: as many rows or none, of ``dtype`` or the same form."""
    return (
        part.dtype == (dtype or rows.dtype)
        and hidden_size_of(part) == hidden_size_of(rows)
        and len(part) in (0, len(rows))
    )


def pack_rows(rows: Tensor) -> Tensor:
    """Make int8 ``[T, H + 4]`` of any float ``[T, H]``; on a GPU without waiting for it."""
    rows = rows.float().contiguous()
    if not usable(rows):
        return pack_rows_reference(rows)
    packed = torch.empty(len(rows), rows.shape[1] + SCALE_BYTES, dtype=torch.int8)
    lib().pack_int8_rows(
        rows=rows.data_ptr(), count=len(rows), hidden=rows.shape[1], packed=packed.data_ptr()
    )
    return packed


def unpack_rows(packed: Tensor) -> Tensor:
    """Make float32 ``[T, H]`` of packed rows."""
    if packed.device.type != "cpu" or library() is None:
        return unpack_rows_reference(packed)
    packed = packed.contiguous()
    rows = torch.empty(len(packed), hidden_size_of(packed))
    lib().unpack_int8_rows(
        packed=packed.data_ptr(), count=len(rows), hidden=rows.shape[1], rows=rows.data_ptr()
    )
    return rows


def pack_rows_reference(rows: Tensor) -> Tensor:
    """Pack float32 rows by torch."""
    largest = rows.new_zeros(len(rows), 1)
    if rows.shape[1]:
        largest.copy_(rows.abs().amax(dim=1, keepdim=True))
    scales = largest.clone().div_(largest.new_tensor(_LARGEST))
    # Below, a scale would not have all its bits, and a byte not be enough.
    scales[scales < torch.finfo(torch.float32).tiny] = 0.0
    scales[~largest.isfinite()] = torch.nan
    numbers = torch.where(scales > 0, (rows / scales).round(), 0.0).to(torch.int8)
    return torch.cat([numbers, scales.view(torch.int8)], dim=1)


def unpack_rows_reference(packed: Tensor) -> Tensor:
    """Unpack rows by torch."""
    hidden_size = hidden_size_of(packed)
    scales = packed.new_empty(len(packed), SCALE_BYTES).copy_(packed[:, hidden_size:])
    return packed[:, :hidden_size].float() * scales.view(torch.float32)
