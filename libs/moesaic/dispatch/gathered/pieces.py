"""Pieces of packed experts, each with a digest: what a message of some of them is compared with.

An expert is cut into pieces of ``PIECE_BYTES`` and a rest. Their digests are taken when it is read from the checkpoint
and go with it from peer to peer, so memory that was damaged since, anywhere on the way, is found out.
"""

from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from torch import Tensor

from moesaic.dispatch.gathered.plan import PULL_BYTES, Runs

PIECE_BYTES = PULL_BYTES
MOST_EXPERTS = 256  # in one message, however small they are


def digests_of(rows: Tensor) -> Tensor:
    """The digests of the pieces of packed experts, uint8 ``[n, nbytes]``: int64 ``[n, pieces]``."""
    row_bytes = rows.shape[1]
    found = [_digests(row, 0, row_bytes) for row in rows]
    return torch.stack(found) if found else torch.empty(0, num_pieces(row_bytes), dtype=torch.int64)


def num_pieces(row_bytes: int) -> int:
    """Pieces of one expert."""
    return -(-row_bytes // PIECE_BYTES)


def pieces_of(start: int, length: int, row_bytes: int) -> range | None:
    """Which pieces of a row of experts ``length`` bytes from ``start`` are; None if they are parts of some."""
    if not (_is_bound(start, row_bytes) and _is_bound(start + length, row_bytes)):
        return None
    return range(_index(start, row_bytes), _index(start + length - 1, row_bytes) + 1)


def is_as_digested(packed: Tensor, start: int, row_bytes: int, digests: Tensor) -> bool:
    """Whether bytes that are whole pieces, uint8 ``[n]`` from ``start``, have these digests, int64 ``[pieces]``."""
    return torch.equal(_digests(packed, start, row_bytes), digests)


def messages_of(num_bytes: int, row_bytes: int) -> Runs:
    """A share of ``num_bytes`` in runs that a message each can hold, of whole pieces."""
    runs: Runs = []
    for start in range(0, num_bytes, row_bytes):
        extend(runs, start, min(row_bytes, num_bytes - start), row_bytes)
    return runs


def extend(runs: Runs, start: int, length: int, row_bytes: int) -> None:
    """Add a run within one expert: to the last one, if it follows and one message can hold both."""
    most = min(PIECE_BYTES, MOST_EXPERTS * row_bytes)
    if runs and sum(runs[-1]) == start and runs[-1][1] + length <= most:
        runs[-1] = runs[-1][0], runs[-1][1] + length
    else:
        runs.extend(_cut(start, length))


def _digests(packed: Tensor, start: int, row_bytes: int) -> Tensor:
    view = memoryview(packed.numpy())  # type: ignore[arg-type]
    digests, end = [], start + len(view)
    for row in range(start // row_bytes * row_bytes, end, row_bytes):
        first = max(start, row)
        for at, size in _cut(first, min(end, row + row_bytes) - first):
            digests.append(xxhash.xxh3_64_intdigest(view[at - start : at - start + size]))
    return torch.from_numpy(np.array(digests, np.uint64).view(np.int64))


def _cut(start: int, length: int) -> Iterator[tuple[int, int]]:
    return (
        (at, min(PIECE_BYTES, start + length - at))
        for at in range(start, start + length, PIECE_BYTES)
    )


def _is_bound(at: int, row_bytes: int) -> bool:
    return at % row_bytes % PIECE_BYTES == 0


def _index(at: int, row_bytes: int) -> int:
    return at // row_bytes * num_pieces(row_bytes) + at % row_bytes // PIECE_BYTES
