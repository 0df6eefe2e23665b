"""Promises to the rows of a request, as the body of its frame.

Little-endian: the number of levels, int32, then threshold (in parts of 10,000) and phase of each
level, int32 each. If there are several levels, the level of each row follows, uint8. The header has
the lowest threshold.
"""

import struct

import numpy as np
import torch

from moesaic.brownout.split import MAX_LEVELS, WHOLE, Level
from moesaic.errors import InvalidInput
from moesaic.kernels.promised import PromisedRows

_NUMBER = struct.Struct("<i")
_LEVEL = struct.Struct("<ii")


def encode_promises(promised: PromisedRows) -> bytes:
    """Write promises as a body."""
    levels = b"".join(_LEVEL.pack(level.parts, level.phase) for level in promised.levels)
    rows = promised.level_of_row.numpy().tobytes() if len(promised.levels) > 1 else b""
    return _NUMBER.pack(len(promised.levels)) + levels + rows


def decode_promises(body: bytes, num_rows: int, device: torch.device) -> PromisedRows:
    """Read promises to ``num_rows`` rows.

    Raises:
        InvalidInput: the body has another form.
    """
    num_levels = _NUMBER.unpack_from(body)[0] if len(body) >= _NUMBER.size else 0
    start = _NUMBER.size + num_levels * _LEVEL.size
    rows = num_rows if num_levels > 1 else 0
    if not 1 <= num_levels <= MAX_LEVELS or len(body) != start + rows:
        raise InvalidInput("frame.body", f"has no promises to {num_rows} rows")
    levels = list(_LEVEL.iter_unpack(body[_NUMBER.size : start]))
    level_of_row = np.frombuffer(body, np.uint8, rows, start) if rows else np.zeros(num_rows, "u1")
    if any(not 0 <= parts <= WHOLE for parts, _ in levels):
        raise InvalidInput("frame.body", f"must have thresholds in 0..{WHOLE}")
    if rows and level_of_row.max() >= num_levels:
        raise InvalidInput("frame.body", f"must have levels below {num_levels}")
    found = [Level(parts / WHOLE, phase) for parts, phase in levels]
    return PromisedRows(found, torch.from_numpy(level_of_row.copy()), device)
