"""A histogram that also takes counts which were made elsewhere."""

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TalliedHistogram(Collector):
    """Counts values by bucket. Any thread may call."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        """Register it; ``bounds`` are the upper ends of its buckets, but for the last, which has none."""
        self._name, self._documentation, self._bounds = name, documentation, tuple(bounds)
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0
        self._lock = threading.Lock()
        REGISTRY.register(self)

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._sum

    def observe(self, value: float) -> None:
        """Count one value."""
        bucket = sum(bound < value for bound in self._bounds)
        self.add([int(at == bucket) for at in range(len(self._counts))], value)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count values that are sorted already: how many by bucket, and their sum."""
        assert len(counts) == len(self._counts)
        with self._lock:
            self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
            self._sum += total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See ``Collector.collect``."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        ends = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate(counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, total)
