"""Waits of a task: for the next attempt, or for the next change of something that another task keeps."""

import asyncio
import random


class Backoff:
    """Pauses that double from ``first_s`` to ``longest_s``; jitter keeps processes from trying in step."""

    def __init__(
        self,
        first_s: float = 0.1,
        longest_s: float = 2.0,
        *,
        jitter: tuple[float, float] = (0.5, 1.0),
    ) -> None:
        """Start at the shortest pause.

        Args:
            first_s: pause after the first failure, in seconds, before jitter.
            longest_s: bound of all pauses, in seconds, before jitter.
            jitter: each pause is multiplied by a number drawn evenly from this range.
        """
        self._first_s, self._longest_s, self._jitter = first_s, longest_s, jitter
        self._next_s = first_s

    def next_pause_s(self) -> float:
        """Draw the pause after one more failure.

        Returns:
            Seconds.
        """
        pause_s = self._next_s * random.uniform(*self._jitter)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return pause_s

    async def pause(self) -> None:
        """Sleep after one more failure."""
        await asyncio.sleep(self.next_pause_s())

    def reset(self) -> None:
        """Begin anew after a success."""
        self._next_s = self._first_s


class Changes:
    """A count of changes that readers can wait on.

    Attributes:
        version: number of changes so far. A reader that passes its last version to ``changed``
            misses nothing.
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
