"""Jittered pauses between attempts, longer after each failure."""

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
