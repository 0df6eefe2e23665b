"""Vital signs of an engine that says nothing: it computes, or it is stuck. Pure.

A long step keeps the engine's event loop from answering, but its layers go by. If none has gone by
for ``STUCK_S``, the engine counts as stuck, and those that wait for it may give up.
"""

import time

STUCK_S = 20.0  # for one layer of a step


class Vitals:
    """Watches a count that grows as long as there is progress."""

    def __init__(self) -> None:
        self._count, self._grown_at = -1, 0.0

    def live(self, count: int, now_s: float | None = None) -> bool:
        """Return true if the engine lives, given the number of layers it has computed so far."""
        now_s = time.monotonic() if now_s is None else now_s
        if count != self._count:
            self._count, self._grown_at = count, now_s
        return now_s - self._grown_at < STUCK_S

    def idle(self) -> None:
        """Take note that the engine has answered: its next silence is a new one."""
        self._count = -1
