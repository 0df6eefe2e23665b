"""Latencies of the last seconds. Pure."""

import math
from collections import deque
from collections.abc import Iterable

from moesaic.brownout.control.contract import Latency

MOST_SAMPLES = 2048  # of one phase; later ones drive out earlier ones
LATE_S = (
    5.0  # kept longer than the window: an engine that rests asks late for the result of a decision
)


def percentile_90(values: Iterable[float]) -> float | None:
    """Return the least value that at least 90 of 100 do not exceed; ``None`` without values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(0.9 * len(ranked)) - 1)] if ranked else None


class LatencyWindow:
    """Latencies of one phase."""

    def __init__(self, window_s: float) -> None:
        """Forget latencies after ``window_s`` seconds."""
        self.window_s = window_s
        self._samples: deque[Latency] = deque(maxlen=MOST_SAMPLES)

    def add(self, sample: Latency) -> None:
        """Take note of one latency."""
        self._samples.append(sample)

    def p90_s(self, now_s: float) -> float | None:
        """Return the 90th percentile in seconds; ``None`` without samples."""
        return percentile_90(sample.seconds for sample in self._recent(now_s))

    def p90_share(self, now_s: float, *, begun_since_s: float = -math.inf) -> float | None:
        """Return the 90th percentile as a share of the target; ``None`` without samples.

        Args:
            now_s: end of the window.
            begun_since_s: samples that began earlier do not count.
        """
        return percentile_90(
            sample.share
            for sample in self._recent(now_s)
            if sample.at_s - sample.seconds >= begun_since_s
        )

    def between_s(self, since_s: float, until_s: float) -> float | None:
        """Return the 90th percentile of the samples of a time, in seconds; ``None`` without any."""
        return percentile_90(s.seconds for s in self._samples if since_s < s.at_s <= until_s)

    def _recent(self, now_s: float) -> list[Latency]:
        while self._samples and self._samples[0].at_s < now_s - self.window_s - LATE_S:
            self._samples.popleft()
        return [sample for sample in self._samples if sample.at_s >= now_s - self.window_s]
