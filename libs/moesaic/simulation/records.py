"""Records of simulated requests, and the figures that they add up to."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.scaling.contract import Objectives
from moesaic.simulation.arrivals import ArrivalTrace, Floats


class RequestRecords:
    """Times of each request of a trace, as its caller sees them.

    Attributes:
        trace: the requests.
        worker: int32 ``[n]``, that it went to; -1: none.
        began_s: float64 ``[n]``, of the first token; NaN: it has none.
        ended_s: float64 ``[n]``, of the last token; NaN: it has not ended.
    """

    def __init__(self, trace: ArrivalTrace) -> None:
        self.trace = trace
        self.worker: NDArray[np.int32] = np.full(len(trace), -1, np.int32)
        self.began_s: Floats = np.full(len(trace), math.nan)
        self.ended_s: Floats = np.full(len(trace), math.nan)

    @property
    def ttft_s(self) -> Floats:
        """Seconds to the first token, of each request; NaN: it has none."""
        return self.began_s - self.trace.at_s

    @property
    def tpot_s(self) -> Floats:
        """Mean seconds of a later token, of each request; NaN: it has none, or has not ended."""
        later = np.where(self.trace.answer_tokens > 1, self.trace.answer_tokens - 1.0, math.nan)
        return (self.ended_s - self.began_s) / later

    def attainment(self, objectives: Objectives, start_s: float = 0.0) -> float:
        """Return the part of the requests from ``start_s`` on that met both targets; 1 if none came.

        Those that have not ended count as late.
        """
        chosen = self.trace.at_s >= start_s
        in_time = (self.ttft_s <= objectives.ttft_s) & ~np.isnan(self.ended_s)
        in_time &= ~(self.tpot_s > objectives.tpot_s)
        return float(in_time[chosen].mean()) if chosen.any() else 1.0


@dataclass(frozen=True)
class LatencyFigures:
    """Mean and percentiles of some latencies; 0 of none."""

    mean_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0

    @classmethod
    def of(cls, seconds: Floats) -> "LatencyFigures":
        """Gather the figures; NaN counts for nothing."""
        known = seconds[~np.isnan(seconds)]
        if not len(known):
            return cls()
        p50_s, p90_s, p99_s = np.percentile(known, (50, 90, 99), method="inverted_cdf")
        return cls(float(known.mean()), float(p50_s), float(p90_s), float(p99_s))


@dataclass(frozen=True)
class ServingFigures:
    """Figures of a simulated fleet.

    Attributes:
        requests: that came.
        ended: of these.
        refused: of these.
        ttft: of first tokens.
        tpot: of later tokens, a mean for each request.
        tokens_per_s: of answers.
        attention_busy: part of the workers' time in which they computed.
        experts_busy: part of their time in which the expert worker that had most to do computed.
        steps: that were computed.
        events: arrivals, ends of steps, and tokens that were delivered.
    """

    requests: int
    ended: int
    refused: int
    ttft: LatencyFigures
    tpot: LatencyFigures
    tokens_per_s: float
    attention_busy: float
    experts_busy: float
    steps: int
    events: int
