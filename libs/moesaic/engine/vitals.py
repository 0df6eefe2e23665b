"""Is an engine that says nothing computing, or stuck? Times in, verdicts out.

A step that takes long keeps the engine's event loop from answering, but its layers go by. One in
which none has gone by for ``STUCK_S`` is no longer vouched for, and whoever waits for it may give up.
"""

import time

STUCK_S = 20.0  # for one layer of a step


class Vitals:
    """Watches a count that grows as long as there is progress."""

    def __init__(self) -> None:
        self._count, self._grown_at = -1, 0.0

    def live(self, count: int, now_s: float | None = None) -> bool:
        """Whether the engine lives, given how many layers it has computed so far."""
        now_s = time.monotonic() if now_s is None else now_s
        if count != self._count:
            self._count, self._grown_at = count, now_s
        return now_s - self._grown_at < STUCK_S

    def idle(self) -> None:
        """Take note that the engine has answered by itself; its next silence counts from its own
        beginning."""
        self._count = -1
