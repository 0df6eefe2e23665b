"""Rates and latencies of the last seconds, from the gateway's own metrics."""

import time
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from prometheus_client import Histogram

from moesaic.services.gateway import metrics
from moesaic.services.gateway.console.state import Quantiles, Traffic

WINDOW_S = 20.0


class Counted(NamedTuple):
    """Counts of a histogram, cumulative by bound, over all its labels."""

    bounds: list[float]
    counts: list[float]

    @property
    def total(self) -> float:
        """Number of observations."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: "Counted") -> "Counted":
        """Give what was counted after ``before``."""
        if not before.counts:
            return self
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return Counted(self.bounds, counts)

    def quantiles(self) -> Quantiles | None:
        """Give quantiles, interpolated within a bucket; None without observations."""
        if not self.total:
            return None
        return Quantiles(*(self._quantile(share) for share in (0.5, 0.9, 0.99)))

    def _quantile(self, share: float) -> float:
        wanted = share * self.total
        idx = bisect_left(self.counts, wanted)
        edges = [0.0, *self.bounds]
        # The last bucket has no bound: its lower one is all that is known.
        if idx + 1 >= len(edges) - 1:
            return edges[-2]
        below = self.counts[idx - 1] if idx else 0.0
        part = (wanted - below) / (self.counts[idx] - below)
        return edges[idx] + part * (edges[idx + 1] - edges[idx])


def counted(histogram: Histogram) -> Counted:
    """Read a histogram, summed over its labels."""
    by_bound = {float(le): num for le, num in metrics.sums(histogram, "bucket", "le").items()}
    bounds = sorted(by_bound)
    return Counted(bounds, [by_bound[bound] for bound in bounds])


class _Sample(NamedTuple):
    at_s: float
    requests: float
    ttft: Counted
    itl: Counted
    e2e: Counted


class TrafficWindow:
    """Samples of the metrics over the last ``WINDOW_S``."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def look(self, inflight: int, queued: int) -> Traffic:
        """Take a sample, and tell what has happened since the oldest one.

        Args:
            inflight: requests in flight.
            queued: sequences that wait for a worker.
        """
        now = _Sample(
            time.monotonic(),
            metrics.sums(metrics.requests, "total")[""],
            *(counted(each) for each in (metrics.ttft_s, metrics.itl_s, metrics.e2e_s)),
        )
        self._samples.append(now)
        while len(self._samples) > 1 and self._samples[1].at_s <= now.at_s - WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        window_s = now.at_s - first.at_s
        if not window_s:
            return Traffic(window_s=0.0, inflight=inflight, queued=queued)
        ttft, itl, e2e = (
            after.since(before) for after, before in zip(now[2:], first[2:], strict=True)
        )
        return Traffic(
            window_s=round(window_s, 3),
            requests_per_s=round((now.requests - first.requests) / window_s, 3),
            tokens_per_s=round((ttft.total + itl.total) / window_s, 3),
            inflight=inflight,
            queued=queued,
            ttft=ttft.quantiles(),
            itl=itl.quantiles(),
            e2e=e2e.quantiles(),
        )
