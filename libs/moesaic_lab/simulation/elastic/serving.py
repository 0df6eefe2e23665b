"""Service of a fleet over days, by the replay that decisions about real fleets are made with.

Millions of requests are not followed one by one. Demand is cut into stretches of a minute at most, in which the
shape stays, and only the rate of each stretch counts. A sample of this rate is replayed once for each shape: Poisson
arrivals on one attention worker, which gets its share in turn. The other workers have similar steps. Requests that
wait are not carried into the next stretch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import ceil, exp, log, sqrt

import numpy as np

from moesaic.messages.scaling import FleetShape, ScalingForecast
from moesaic.scaling.contract import Objectives, RecentDemand, StepRows, StepTime, StepTimes
from moesaic.scaling.replay import forecast
from moesaic_lab.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic_lab.simulation.elastic.demand import DemandSeries
from moesaic_lab.simulation.elastic.steady import StudiedFleet

STRETCH_S = 60.0
FEWEST = 200  # requests of a sample, which may take longer than a stretch
GRID = 0.03  # rates are rounded up by at most so much, so that samples repeat


def serve(
    fleet: StudiedFleet,
    demand: DemandSeries,
    shapes: Sequence[FleetShape],
    objectives: Objectives,
) -> float:
    """Let a fleet serve demand.

    Args:
        fleet: the way to serve.
        demand: by bins.
        shapes: in force, one for each bin.
        objectives: targets.

    Returns:
        The part of the requests that meet both targets; 1 without any.
    """
    most, first, met = max(1, round(STRETCH_S / demand.bin_s)), 0, 0.0
    for shape, same in groupby(shapes):
        end = first + sum(1 for _ in same)
        for begin in range(first, end, most):
            counts = demand.counts[begin : min(end, begin + most)]
            if (requests := float(counts.sum())) > 0:
                rate = requests / (len(counts) * demand.bin_s)
                met += requests * sample(fleet, shape, rate, demand, objectives).attainment
        first = end
    total = float(demand.counts.sum())
    return met / total if total else 1.0


def sample(
    fleet: StudiedFleet,
    shape: FleetShape,
    rate: float,
    demand: DemandSeries,
    objectives: Objectives,
) -> ScalingForecast:
    """Replay arrivals at one rate, with the lengths of a demand.

    Args:
        fleet: the way to serve.
        shape: in force.
        rate: requests a second of the whole fleet, above 0.
        demand: has the lengths.
        objectives: targets.
    """
    rounded = exp(ceil(log(rate) / GRID) * GRID)
    return _sample(fleet, shape, rounded, demand.prompt_tokens, demand.answer_tokens, objectives)


@lru_cache(maxsize=1 << 14)
def _sample(
    fleet: StudiedFleet,
    shape: FleetShape,
    rate: float,
    prompt_tokens: float,
    answer_tokens: float,
    objectives: Objectives,
) -> ScalingForecast:
    own_rate = rate / shape.attention
    span_s = max(STRETCH_S, FEWEST / own_rate)
    lengths = ArrivalTrace.of(
        np.zeros(1),
        np.full(1, max(1, round(prompt_tokens))),
        np.full(1, max(1, round(answer_tokens))),
    )
    # Every so manieth arrival of a Poisson process: gaps vary less, by the root of their number.
    trace = RateCurve.constant(own_rate, span_s).arrivals(lengths, 0, 1 / sqrt(shape.attention))
    arrivals = RecentDemand(trace.at_s, trace.prompt_tokens, trace.answer_tokens, span_s)
    return forecast(
        arrivals,
        FleetShape(1, shape.experts),
        _OneOfMany(fleet.times, shape),
        fleet.times.limits(shape),
        objectives,
    )


@dataclass(frozen=True, eq=False)
class _OneOfMany:
    """Times of the steps of one attention worker of a larger shape."""

    times: StepTimes
    shape: FleetShape

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        return self.times.step(rows, self.shape)
