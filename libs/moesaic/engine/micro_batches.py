"""Micro-batches: several forward passes of one step at once, so that attention of one overlaps experts of another
(JANUS section 6)."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from moesaic.engine.sequences.sequence import Chunk
from moesaic.models.layers.decoder import MoELayer

LEAST_ROWS = 4  # of a micro-batch: fewer are not worth a pass of their own
T = TypeVar("T")


def split(chunks: Sequence[Chunk], count: int) -> list[list[Chunk]]:
    """Cut a step's chunks, in order, into up to ``count`` parts of about as many rows each.

    Chunks stay whole. Each part has at least ``LEAST_ROWS`` rows and half of the mean, or there are
    fewer parts.
    """
    rows = [len(chunk.token_ids) for chunk in chunks]
    total = sum(rows)
    for parts in range(min(count, total // LEAST_ROWS, len(chunks)), 1, -1):
        # A chunk belongs to the part that its middle falls into.
        part_of = [
            (2 * end - num) * parts // (2 * total)
            for num, end in zip(rows, accumulate(rows), strict=True)
        ]
        cut = [
            [chunk for chunk, at in zip(chunks, part_of, strict=True) if at == part]
            for part in range(parts)
        ]
        least = max(LEAST_ROWS, total / parts / 2)
        if all(sum(len(c.token_ids) for c in part) >= least for part in cut):
            return cut
    return [list(chunks)]


def split_evenly(chunks: Sequence[Chunk], count: int) -> list[list[Chunk]]:
    """Cut a step's rows, in order, into up to ``count`` parts that differ by one row at most.

    A chunk may be cut, so the parts must pass each layer's attention in their order. Each part has at
    least ``LEAST_ROWS`` rows, or there are fewer parts.
    """
    total = sum(len(chunk.token_ids) for chunk in chunks)
    num_parts = max(1, min(count, total // LEAST_ROWS))
    left = deque(chunks)
    parts: list[list[Chunk]] = []
    for part in range(num_parts):
        room = total * (part + 1) // num_parts - total * part // num_parts
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


async def run_together(
    forward: Callable[[T, MoELayer], Awaitable[Tensor]],
    batches: Sequence[T],
    moes: Sequence[MoELayer],
) -> list[Tensor]:
    """Run ``forward`` for every batch with its experts, side by side.

    If one of them fails, the others stop at their next expert layer. They are not cancelled: that
    would cost the links that wait for their replies.

    Returns:
        The result of each.

    Raises:
        Exception: the first that was raised, once all have ended.
    """
    failures: list[BaseException] = []

    async def run(batch: T, moe: MoELayer) -> Tensor | None:
        async def layer(index: int, hidden: Tensor) -> Tensor:
            if failures:
                raise _OtherFailed
            sent = moe(index, hidden)
            await asyncio.sleep(0)  # the others compute while this one's experts do
            return await sent

        try:
            return await forward(batch, layer)
        except _OtherFailed:
            return None
        except Exception as error:
            failures.append(error)
            return None

    if len(batches) == 1:
        return [await forward(batches[0], moes[0])]
    results = await asyncio.gather(*map(run, batches, moes))
    if failures:
        raise failures[0]
    return [result for result in results if result is not None]


class _OtherFailed(Exception):
    """Another micro-batch of the same step has failed."""
