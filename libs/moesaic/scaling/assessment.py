"""Facts of one decision: what is missed now, and what shapes are predicted to do. Each forecast is made once."""

import math
from dataclasses import replace
from functools import cached_property

from msgspec.structs import replace as replaced

from moesaic.errors import InvalidInput
from moesaic.messages.scaling import FleetShape, ScalingForecast, ScalingPolicy
from moesaic.scaling.candidates import Judge, cheapest, shape_cost
from moesaic.scaling.contract import ScalingState, ServingLimits, ShapeBounds, StepTimes
from moesaic.scaling.replay import forecast, meets
from moesaic.scaling.steady_state import SteadyState

FEW_REQUESTS = 10  # of fewer, what was measured says nothing
FEW_WAITING = 4
EXACT = 0.999  # threshold
SAME = 0.02  # attainments that differ by less
SAME_DELAY, BETTER = 1.05, 0.9  # latencies, by others


class Assessment:
    """Facts about a fleet whose costs may be known.

    Attributes:
        policy: policy of operators.
        state: state to assess.
        times: times of steps; None: unknown.
        goal: the shape that the fleet has or is on its way to, within bounds.
        lacks_part: some of that cannot be brought now.
        is_settled: the fleet is there.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        state: ScalingState,
        times: StepTimes | None,
        limits: ServingLimits,
    ) -> None:
        """Predict nothing yet.

        Raises:
            InvalidInput: a target is not positive.
        """
        for field in ("ttft_s", "tpot_s"):
            if not (target_s := getattr(state.objectives, field)) > 0:
                raise InvalidInput(f"objectives.{field}", f"must be positive, got {target_s:g}")
        self.policy, self.state, self.times, self._limits = policy, state, times, limits
        wanted = state.intended or state.shape
        # Else nobody carries it out.
        if state.action is not None and policy.mode == "auto":
            wanted = state.action.shape
        self.goal = within(state.bounds, wanted)
        self.lacks_part = self.goal != wanted
        self.is_settled = state.shape == self.goal
        self._forecasts: dict[tuple[FleetShape, float], ScalingForecast] = {}
        self._judged: dict[tuple[FleetShape, float, float], bool] = {}

    @property
    def target(self) -> float:
        """Part of the requests that shall meet the targets."""
        return self.state.objectives.attainment

    @property
    def measured_missed(self) -> bool:
        """True if too few of the latest requests met the targets."""
        found = self.state.attainment
        return found is not None and found < self.target and len(self.state.demand) >= FEW_REQUESTS

    @property
    def queue_grows(self) -> bool:
        """True if requests wait for longer than their first token may take, as their number tells (Little)."""
        waiting, usual = self.state.waiting, self.state.demand.requests_per_s
        return waiting >= FEW_WAITING and waiting > usual * self.state.objectives.ttft_s

    @property
    def is_degraded(self) -> bool:
        """True while brownout holds the targets."""
        return min(self.state.thresholds) < EXACT

    @cached_property
    def is_missed(self) -> bool:
        """True if the present fleet misses targets, measured or predicted."""
        return self.measured_missed or (
            self.times is not None and not self.attains(self.state.shape, 1.0)
        )

    def attains(self, shape: FleetShape, headroom: float, target: float | None = None) -> bool:
        """Predict if a shape meets the objectives, or another attainment."""
        target = self.target if target is None else target
        if len(self.state.demand) and not self.can_serve(shape):
            return False
        if (known := self._forecasts.get((shape, headroom))) is not None:
            return known.attainment >= target
        key = shape, headroom, target
        if key not in self._judged:
            objectives = replace(self.state.objectives, attainment=target)
            self._judged[key] = not len(self.state.demand) or meets(
                self.state.demand, shape, self._times, self._limits, objectives, headroom
            )
        return self._judged[key]

    def forecast(self, shape: FleetShape, headroom: float) -> ScalingForecast:
        """Predict what a shape does, which can serve."""
        key = shape, headroom
        if key not in self._forecasts:
            state = self.state
            found = forecast(
                state.demand, shape, self._times, self._limits, state.objectives, headroom
            )
            self._forecasts[key] = replaced(found, cost=shape_cost(self.policy, shape))
        return self._forecasts[key]

    def can_serve(self, shape: FleetShape) -> bool:
        """Return true if no side lacks workers."""
        return shape.attention > 0 and (shape.experts > 0 or self.state.bounds.most.experts == 0)

    def cheapest(
        self,
        bounds: ShapeBounds,
        headroom: float,
        target: float | None = None,
        below: float | None = None,
    ) -> FleetShape | None:
        """Find the cheapest shape that is predicted to meet the objectives, or another attainment."""
        return self._search(
            bounds, headroom, lambda shape: self.attains(shape, headroom, target), below
        )

    def best_attainable(self, headroom: float) -> FleetShape | None:
        """Find the cheapest of the best shapes that have all workers there are, and more; none if none is better.

        Where load is far above what any of them serves, all requests are late: the delay tells them apart.
        """
        bounds, most = self.growth, self.state.bounds.most
        rows = range(bounds.least.attention, most.attention + 1)
        largest = [FleetShape(each, most.experts) for each in rows]
        found = [self.forecast(shape, headroom) for shape in largest if self.can_serve(shape)]
        if not found:
            return None
        attainment, delay = max(each.attainment for each in found), min(map(self._delay, found))
        now = self.forecast(self.goal, headroom) if self.can_serve(self.goal) else None
        if now is None or attainment >= now.attainment + SAME:
            least = attainment - SAME / 2
            return self._search(
                bounds, headroom, lambda shape: self.attains(shape, headroom, least)
            )
        if delay > self._delay(now) * BETTER:
            return None
        return self._search(
            bounds,
            headroom,
            lambda shape: self._delay(self.forecast(shape, headroom)) <= delay * SAME_DELAY,
        )

    def _search(
        self, bounds: ShapeBounds, headroom: float, judge: Judge, below: float | None = None
    ) -> FleetShape | None:
        state, guess = self.state, None
        if len(state.demand):
            steady = SteadyState(state.demand, self._times, self._limits, headroom)

            def guess(shape: FleetShape) -> float:
                able = self.can_serve(shape)
                return steady.token_s(shape) / state.objectives.tpot_s if able else math.inf

        def is_good(shape: FleetShape) -> bool:
            return (not len(state.demand) or self.can_serve(shape)) and judge(shape)

        return cheapest(self.policy, bounds, state.shape, is_good, guess, below)

    def _delay(self, of: ScalingForecast) -> float:
        """Return the worse of both latencies, by its target."""
        targets = self.state.objectives
        return max(of.ttft_p90_s / targets.ttft_s, of.tpot_p90_s / targets.tpot_s)

    @property
    def growth(self) -> ShapeBounds:
        """Bounds of shapes that take no worker away."""
        return ShapeBounds(self.goal, self.state.bounds.most)

    @property
    def _times(self) -> StepTimes:
        if self.times is None:
            raise AssertionError("nothing is predicted without times")
        return self.times


def within(bounds: ShapeBounds, shape: FleetShape) -> FleetShape:
    """Return the shape within bounds that is nearest."""
    least, most = bounds.least, bounds.most
    return FleetShape(
        max(least.attention, min(shape.attention, most.attention)),
        max(least.experts, min(shape.experts, most.experts)),
    )
