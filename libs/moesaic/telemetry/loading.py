"""Progress of loading weights, in bytes: for the terminal, for metrics, and for those who wait for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Gauge

_DONE = Gauge("moesaic_load_done_bytes", "Bytes loaded so far of the weights being loaded")
_ALL = Gauge("moesaic_load_expected_bytes", "Bytes of all weights being loaded")


@dataclass(frozen=True)
class Loading:
    """A look at loading under way.

    Attributes:
        done: bytes that are here, as stored in files.
        total: bytes of all that is being loaded.
        seconds: since it began.
    """

    done: int
    total: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second so far."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes at this rate; None: not known yet."""
        return (self.total - self.done) / self.rate if self.done else None

    def __str__(self) -> str:
        text = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {self.rate / 1e6:.0f} MB/s"
        return text if self.left_s is None else f"{text}, {self.left_s:.0f} s left"


class LoadProgress:
    """Counts the bytes of one model that a process loads. Any thread may call."""

    def __init__(self) -> None:
        """Begin with nothing to load."""
        self._lock = threading.Lock()
        self._under_way = self._done = self._total = 0
        self._began_s = 0.0

    @contextmanager
    def expecting(self, num_bytes: int) -> Iterator[None]:
        """Have so many bytes to load for the length of the block, beside those of other blocks."""
        with self._lock:
            if not self._under_way:
                self._began_s = time.monotonic()
            self._under_way += 1
            self._total += num_bytes
            self._show()
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._done = self._total = 0
                self._show()

    def add(self, num_bytes: int) -> None:
        """Note bytes that have come."""
        with self._lock:
            # Nobody waits for others.
            if self._under_way:
                self._done = min(self._done + num_bytes, self._total)
                self._show()

    def look(self) -> Loading | None:
        """The loading under way; None: there is none."""
        with self._lock:
            if not self._under_way:
                return None
            return Loading(self._done, self._total, time.monotonic() - self._began_s)

    def _show(self) -> None:
        _DONE.set(self._done)
        _ALL.set(self._total)
