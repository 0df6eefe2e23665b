"""Steady states: the step that a rate of requests leads to on a fleet, and the cheapest fleet that meets targets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, inf, log

import numpy as np

from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives, StepRows
from moesaic_lab.simulation.elastic.demand import DemandSeries
from moesaic_lab.simulation.elastic.fleet_times import FleetTimes

_ROUNDS = 60
_CLOSE = 1e-3
_GRID = 0.03  # rates are rounded up by at most so much, so that decisions repeat


@dataclass(frozen=True)
class SteadyFlow:
    """Seconds of a fleet under a constant rate.

    Attributes:
        tpot_s: of later tokens, which is one step.
        ttft_s: of first tokens.
        sequences: on one attention worker.
    """

    tpot_s: float
    ttft_s: float
    sequences: float


def steady_flow(
    times: FleetTimes,
    shape: FleetShape,
    rate: float,
    demand: DemandSeries,
    most_s: float = inf,
) -> SteadyFlow | None:
    """Find the state in which as many requests end as come; None if the fleet cannot keep up.

    Steps begin short and grow until they are as long as their own requests make them.

    Args:
        times: of the fleet.
        shape: of the fleet.
        rate: requests a second, of the whole fleet.
        demand: lengths of requests.
        most_s: longer steps are of no interest.
    """
    limits, own_rate = times.limits(shape), rate / shape.attention
    most = min(limits.max_num_seqs, limits.kv_tokens / demand.context_tokens)
    step_s = times.step(_rows(1.0, 0.0, demand), shape).seconds
    for _ in range(_ROUNDS):
        sequences = own_rate * demand.answer_tokens * step_s
        prompt_rows = own_rate * demand.prompt_tokens * step_s
        if sequences > most or sequences + prompt_rows > limits.max_num_batched_tokens:
            return None
        found_s = times.step(_rows(max(1.0, sequences), prompt_rows, demand), shape).seconds
        if abs(found_s - step_s) <= _CLOSE * step_s:
            chunks = max(1, ceil(demand.prompt_tokens / limits.max_num_batched_tokens))
            return SteadyFlow(found_s, found_s * (0.5 + chunks), sequences)
        step_s = found_s
        if step_s > most_s:
            return None
    return None


def _rows(sequences: float, prompt_rows: float, demand: DemandSeries) -> StepRows:
    prompt_keys = prompt_rows * demand.prompt_tokens / 2
    return StepRows(prompt_rows, sequences, sequences * demand.context_tokens, prompt_keys)


@dataclass(frozen=True, eq=False)
class StudiedFleet:
    """One way to serve, and the shapes that it may have.

    Attributes:
        name: for people.
        times: of its steps.
        unit: attention and expert workers come in so many at once.
        sizes: of a fleet that has all in one instance; None: any shape of two sides.
        most: devices.
    """

    name: str
    times: FleetTimes
    unit: int = 1
    sizes: tuple[int, ...] | None = None
    most: int = 256

    def cheapest(
        self, rate: float, demand: DemandSeries, objectives: Objectives
    ) -> FleetShape | None:
        """Find the shape with fewest devices that meets the targets in a steady state; None: none does."""
        if rate <= 0:
            rate = 1e-3
        rounded = exp(ceil(log(rate) / _GRID) * _GRID)
        return _cheapest(self, rounded, demand.prompt_tokens, demand.answer_tokens, objectives)

    def largest(self) -> FleetShape:
        """Return the largest shape, for demand that none can meet."""
        if self.sizes is not None:
            return FleetShape(self.sizes[-1], 0)
        half = self.most // 2 // self.unit * self.unit
        return FleetShape(half, half)

    def shapes_up_to(self, most: int) -> Iterator[FleetShape]:
        """List the shapes that hold the model, with at most so many devices."""
        if self.sizes is not None:
            yield from (FleetShape(n, 0) for n in self.sizes if n <= most)
            return
        least = _rounded_up(self.times.least.experts, self.unit)
        for experts in range(least, most, self.unit):
            for attention in range(self.unit, most - experts + 1, self.unit):
                yield FleetShape(attention, experts)


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@lru_cache(maxsize=1 << 14)
def _cheapest(
    fleet: StudiedFleet, rate: float, prompt: float, answer: float, objectives: Objectives
) -> FleetShape | None:
    demand = DemandSeries(np.zeros(0), 1.0, prompt, answer)

    def suits(shape: FleetShape) -> bool:
        if not fleet.times.holds(shape):
            return False
        state = steady_flow(fleet.times, shape, rate, demand, objectives.tpot_s)
        return (
            state is not None
            and state.tpot_s <= objectives.tpot_s
            and state.ttft_s <= objectives.ttft_s
        )

    if fleet.sizes is not None:
        return next((s for n in fleet.sizes if suits(s := FleetShape(n, 0))), None)
    return _cheapest_of_two_sides(fleet, suits)


def _cheapest_of_two_sides(
    fleet: StudiedFleet, suits: Callable[[FleetShape], bool]
) -> FleetShape | None:
    """Search by the number of expert workers.

    Too few attention workers are too slow, and very many crowd the experts; so they are doubled until they suit, and
    the fewest are then found by halving.
    """
    unit, best = fleet.unit, None
    least = _rounded_up(fleet.times.least.experts, unit)
    for experts in range(least, fleet.most, unit):
        most = ((fleet.most if best is None else best.total - unit) - experts) // unit
        if most < 1:
            break
        low, high = 0, 1
        while high <= most and not suits(FleetShape(high * unit, experts)):
            low, high = high, most if high < most < 2 * high else 2 * high
        if high > most:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if suits(FleetShape(middle * unit, experts)):
                high = middle
            else:
                low = middle
        best = FleetShape(high * unit, experts)
    return best
