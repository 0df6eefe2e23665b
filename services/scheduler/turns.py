"""PlacementTurns at the placement: one at a time, for the loop and for operators."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PlacementTurns:
    """The right to change the placement. A plan that the loop still makes gives way to operators."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_operators = 0

    @property
    def operator_waits(self) -> bool:
        """True while an operator waits for a turn."""
        return self._num_operators > 0

    @asynccontextmanager
    async def of_loop(self) -> AsyncIterator[None]:
        """Have a turn for the length of the block."""
        async with self._lock:
            yield

    @asynccontextmanager
    async def of_operator(self) -> AsyncIterator[None]:
        """Have a turn for the length of the block, ahead of plans."""
        self._num_operators += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_operators -= 1
        try:
            yield
        finally:
            self._lock.release()
