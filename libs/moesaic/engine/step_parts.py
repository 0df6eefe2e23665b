"""Parts of a step that take turns: attention of one overlaps experts of another (JANUS section 6). Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from moesaic.engine.sequences.sequence import Chunk


def split_evenly(chunks: Sequence[Chunk], count: int) -> list[list[Chunk]]:
    """Cut a step's rows, in order, into ``count`` parts that differ by one row at most.

    A chunk may be cut, so the parts must pass each layer's attention in their order. There are at
    least ``count`` rows.
    """
    total = sum(len(chunk.token_ids) for chunk in chunks)
    assert 1 <= count <= total
    left = deque(chunks)
    parts: list[list[Chunk]] = []
    for part in range(count):
        room = total * (part + 1) // count - total * part // count
        parts.append([])
        while room:
            chunk = left.popleft()
            if len(chunk.token_ids) > room:
                chunk, rest = _cut(chunk, room)
                left.appendleft(rest)
            parts[-1].append(chunk)
            room -= len(chunk.token_ids)
    return parts


def _cut(chunk: Chunk, num_rows: int) -> tuple[Chunk, Chunk]:
    """Cut a chunk behind its first rows; both parts together want what it wants."""
    num_behind = len(chunk.token_ids) - num_rows
    return (
        replace(
            chunk,
            token_ids=chunk.token_ids[:num_rows],
            wanted=max(0, chunk.wanted - num_behind),
        ),
        replace(
            chunk,
            token_ids=chunk.token_ids[num_rows:],
            start=chunk.start + num_rows,
            wanted=min(chunk.wanted, num_behind),
        ),
    )
