"""The handshakes of one network that are under way."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Handshakes:
    """Counts them. Lives on one event loop."""

    def __init__(self) -> None:
        self._number, self._none = 0, asyncio.Event()
        self._none.set()

    @property
    def under_way(self) -> bool:
        """True if there is one."""
        return self._number > 0

    async def ended(self) -> None:
        """Wait until there is none."""
        await self._none.wait()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a handshake while its body runs."""
        self._number += 1
        self._none.clear()
        try:
            yield
        finally:
            self._number -= 1
            if not self._number:
                self._none.set()
