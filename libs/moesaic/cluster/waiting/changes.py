"""Waiting for the next change of something that another task keeps."""

import asyncio


class Changes:
    """A count of changes that readers can wait on.

    Attributes:
        version: number of changes so far. A reader that passes the version it last looked at to
            ``changed`` misses nothing.
    """

    def __init__(self) -> None:
        self.version = 0
        self._next = asyncio.Event()

    async def changed(self, since: int | None = None) -> None:
        """Wait for the next change; return at once if there was one after version ``since``."""
        if since is None or since == self.version:
            await self._next.wait()

    def note_change(self) -> None:
        """Wake all readers that wait."""
        self.version += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()
