"""Pace of loading beside serving: a part of the time, and an end at any moment.

The loading thread keeps its priority. A thread of low priority that is set aside while it has
Python's lock would keep the engine's thread waiting for it; one that sleeps has no lock.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moesaic.errors import InvalidInput, NotReady

MOST_REST_S = 20.0  # after one piece of work: what took so long was rather held up by others


class LoadPace:
    """The pace at which one placement may be loaded, and its end if nobody wants it any more.

    Rest is taken before the next work, so the last work is followed by none. A pace that rests is for one thread:
    ``num_threads``.
    """

    def __init__(self, share: float = 1.0) -> None:
        """Work for at most a ``share`` of the time, in (0, 1]; 1 never rests, and no rest exceeds ``MOST_REST_S``.

        Raises:
            InvalidInput: it is outside of that.
        """
        if not 0.0 < share <= 1.0:
            raise InvalidInput("load_share", f"must be above 0 and at most 1, got {share}")
        self._rest_per_work = 1.0 / share - 1.0
        self._cancelled = threading.Event()
        self._owed_s = 0.0

    @property
    def num_threads(self) -> int | None:
        """Threads that load at this pace: one that rests, or as many as there are (None)."""
        return 1 if self._rest_per_work else None

    def cancel(self) -> None:
        """End the loading, from any thread; a thread that rests wakes up."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise ``NotReady`` if the loading was cancelled."""
        if self._cancelled.is_set():
            raise NotReady("the placement is no longer wanted", code="placement_changing")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Sleep in proportion to the work before, on a thread of its own; then measure this.

        Raises:
            NotReady: the loading was cancelled.
        """
        if self._owed_s:
            self._cancelled.wait(self._owed_s)
        self.check()
        began = time.monotonic()
        try:
            yield
        finally:
            worked_s = time.monotonic() - began
            self._owed_s = min(worked_s * self._rest_per_work, MOST_REST_S)
