"""Waiting for the next change of something that others keep."""

import asyncio


class Changes:
    """Counts its changes and lets readers wait for the next one.

    Attributes:
        version: how often it changed. A reader that remembers the version it last looked at, and
            passes it to ``changed``, misses nothing.
    """

    def __init__(self) -> None:
        self.version = 0
        self._next = asyncio.Event()

    async def changed(self, since: int | None = None) -> None:
        """Wait for the next change; return at once if there was one after version ``since``."""
        if since is None or since == self.version:
            await self._next.wait()

    def note_change(self) -> None:
        """Wake everyone who waits."""
        self.version += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()
