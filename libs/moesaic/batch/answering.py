"""Answer many requests at once, and hand the results on in the order of the input."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from moesaic.batch.requests import BatchRequest, Line
from moesaic.batch.results import Result, refused

READ_AHEAD = 16  # lines
HELD_PER_REQUEST = 16  # results that may wait for an earlier one, for each request under way

Ask = Callable[[BatchRequest], Awaitable[Result]]
Write = Callable[[Sequence[Result]], None]
T = TypeVar("T")


class InOrder:
    """Results, put back into the order of their requests. Pure."""

    def __init__(self) -> None:
        self._held: dict[int, Result] = {}
        self._next = 0

    def put(self, index: int, result: Result) -> None:
        """Take the result of the request at ``index``, counted from 0; each comes once."""
        assert index >= self._next
        assert index not in self._held
        self._held[index] = result

    def take(self) -> list[Result]:
        """Give the results that have no gap before them, in order; each is given once."""
        ready = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready


async def answer_all(lines: Iterator[Line], ask: Ask, write: Write, max_inflight: int) -> None:
    """Answer every line and write every result exactly once, in the order of the lines.

    Files are read and written off the event loop. A cancellation, or an error of ``ask`` or
    ``write``, cancels all requests in flight. The results written by then are the first ones,
    without a gap.

    Args:
        lines: read a few at a time, as requests become free.
        ask: answers one request.
        write: gets results as soon as they are next in order, never two calls at once.
        max_inflight: requests in flight at once. Up to ``HELD_PER_REQUEST`` times as many results
            are held back.
    """
    window = asyncio.Semaphore(max_inflight * HELD_PER_REQUEST)
    reading = asyncio.Lock()
    is_writing = False
    ordered = InOrder()
    ahead: deque[Line] = deque()
    num_taken = 0

    async def next_line() -> tuple[int, Line] | None:
        nonlocal num_taken
        async with reading:
            if not ahead:
                ahead.extend(await to_its_end(lambda: list(islice(lines, READ_AHEAD))))
            if not ahead:
                return None
            num_taken += 1
            return num_taken - 1, ahead.popleft()

    async def work() -> None:
        while True:
            await window.acquire()
            if (taken := await next_line()) is None:
                # For the others, which have to find out as well.
                window.release()
                return
            index, line = taken
            result = await ask(line) if isinstance(line, BatchRequest) else refused(line)
            ordered.put(index, result)
            await write_ready()

    async def write_ready() -> None:
        nonlocal is_writing
        if is_writing:
            # The call that is at it writes this as well.
            return
        is_writing = True
        while ready := ordered.take():
            await to_its_end(functools.partial(write, ready))
            for _ in ready:
                window.release()
        is_writing = False

    async with asyncio.TaskGroup() as workers:
        for _ in range(max_inflight):
            workers.create_task(work())


async def to_its_end(work: Callable[[], T]) -> T:
    """Run file work in a thread, to its end even if the caller is cancelled: nothing is written after return."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
