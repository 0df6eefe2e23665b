"""Pieces of packed experts, each with a digest that every message is compared with.

An expert is cut into pieces of ``PIECE_BYTES`` and a rest. Their digests are taken when it is read
from the checkpoint and go with it from peer to peer. So memory that was damaged since is found out,
anywhere on the way.
"""

from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from torch import Tensor

PIECE_BYTES = 1 << 20


def digests_of(rows: Tensor) -> Tensor:
    """The digests, int64 ``[n, pieces]``, of packed experts, uint8 ``[n, nbytes]``."""
    row_bytes = rows.shape[1]
    found = [_digests(row, 0, row_bytes) for row in rows]
    return torch.stack(found) if found else torch.empty(0, num_pieces(row_bytes), dtype=torch.int64)


def num_pieces(row_bytes: int) -> int:
    """Pieces of one expert."""
    return -(-row_bytes // PIECE_BYTES)


def pieces_of(start: int, length: int, row_bytes: int) -> range | None:
    """Indices of the pieces that ``length`` bytes from ``start`` of a row of experts are.

    Returns:
        ``None`` if the bytes begin or end within a piece.
    """
    if not (_is_bound(start, row_bytes) and _is_bound(start + length, row_bytes)):
        return None
    return range(_index(start, row_bytes), _index(start + length - 1, row_bytes) + 1)


def is_as_digested(packed: Tensor, start: int, row_bytes: int, digests: Tensor) -> bool:
    """True if whole pieces, uint8 ``[n]`` from ``start``, have these digests, int64 ``[pieces]``."""
    return torch.equal(_digests(packed, start, row_bytes), digests)


def cut(start: int, length: int) -> Iterator[tuple[int, int]]:
    """Bytes of one expert, ``length`` from ``start``, piece by piece: (start, length)."""
    return (
        (at, min(PIECE_BYTES, start + length - at))
        for at in range(start, start + length, PIECE_BYTES)
    )


def _digests(packed: Tensor, start: int, row_bytes: int) -> Tensor:
    view = memoryview(packed.numpy())  # type: ignore[arg-type]  # numpy's stubs hide the buffer
    digests, end = [], start + len(view)
    for row in range(start // row_bytes * row_bytes, end, row_bytes):
        first = max(start, row)
        for at, size in cut(first, min(end, row + row_bytes) - first):
            digests.append(xxhash.xxh3_64_intdigest(view[at - start : at - start + size]))
    return torch.from_numpy(np.array(digests, np.uint64).view(np.int64))


def _is_bound(at: int, row_bytes: int) -> bool:
    return at % row_bytes % PIECE_BYTES == 0


def _index(at: int, row_bytes: int) -> int:
    return at // row_bytes * num_pieces(row_bytes) + at % row_bytes // PIECE_BYTES
