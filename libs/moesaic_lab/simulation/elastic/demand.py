"""Demand of a fleet as a series of counts, for studies of days: millions of requests are not followed one by one."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic_lab.simulation.arrivals import ArrivalTrace, RateCurve

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DemandSeries:
    """Requests that arrive in bins of equal length, all of the mean length.

    Attributes:
        counts: float64 ``[n]``, requests of each bin.
        bin_s: seconds of a bin.
        prompt_tokens: mean of a prompt.
        answer_tokens: mean of an answer, at least 1.
    """

    counts: Floats
    bin_s: float
    prompt_tokens: float
    answer_tokens: float

    @classmethod
    def drawn(
        cls, curve: RateCurve, bin_s: float, prompt_tokens: float, answer_tokens: float, seed: int
    ) -> Self:
        """Draw counts of Poisson arrivals whose rate follows a curve.

        Raises:
            InvalidInput: the curve's windows are no whole number of bins.
        """
        each = round(curve.window_s / bin_s)
        if each < 1 or abs(each * bin_s - curve.window_s) > 1e-9 * curve.window_s:
            raise InvalidInput("bin_s", f"must divide {curve.window_s:g} s, got {bin_s:g}")
        expected = np.repeat(curve.per_s * bin_s, each)
        counts = np.random.default_rng(seed).poisson(expected).astype(np.float64)
        return cls(counts, bin_s, prompt_tokens, answer_tokens)

    @classmethod
    def counted(cls, trace: ArrivalTrace, bin_s: float) -> Self:
        """Count the requests of a trace.

        Raises:
            InvalidInput: it has none, or is shorter than a bin.
        """
        num_bins = int(trace.span_s / bin_s)
        if not len(trace) or num_bins < 1:
            raise InvalidInput("trace", f"must have requests over at least {bin_s:g} s")
        counts, _ = np.histogram(trace.at_s, num_bins, (0.0, num_bins * bin_s))
        computed = trace.prompt_tokens - trace.cached_tokens
        return cls(
            counts.astype(np.float64),
            bin_s,
            float(computed.mean()),
            float(trace.answer_tokens.mean()),
        )

    @property
    def span_s(self) -> float:
        """Seconds of all bins."""
        return len(self.counts) * self.bin_s

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a sequence half-way through its answer."""
        return self.prompt_tokens + self.answer_tokens / 2

    def rate(self, first_s: float, last_s: float) -> float:
        """Return the mean requests a second from ``first_s`` to before ``last_s``."""
        first, last = max(0, round(first_s / self.bin_s)), round(last_s / self.bin_s)
        found = self.counts[first:last]
        return float(found.mean()) / self.bin_s if len(found) else 0.0

    def part(self, first_s: float, last_s: float) -> Self:
        """Cut out the bins from ``first_s`` to before ``last_s``."""
        first, last = round(first_s / self.bin_s), round(last_s / self.bin_s)
        return replace(self, counts=self.counts[first:last])
