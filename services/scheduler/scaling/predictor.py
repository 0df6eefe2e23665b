"""Demand and costs of the fleet, as ``moesaic.scaling`` wants them."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput
from moesaic.messages.performance import PerformanceModel
from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.scaling.contract import (
    RecentDemand,
    ScalingChoice,
    ScalingState,
    ServingLimits,
)
from moesaic.scaling.decide import Scaler
from moesaic.scaling.demand import (
    covered_spans,
    recent_demand,
    reported_arrivals,
    without_gaps,
)
from moesaic.scaling.serving_times import Activated, ServingTimes
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.facts import active_attention, active_shape
from moesaic.services.scheduler.scaling.feed import LoadFeed

USUAL_ANSWER_TOKENS = 64.0  # while no answer has ended
# After a change of shape: until then most of the steps that costs are fitted to were of the shape before.
STEPS_FADE_S = 60.0
_NOTHING = np.zeros(0, np.int64)
NO_DEMAND = RecentDemand(np.zeros(0), _NOTHING, _NOTHING, 0.0)


class FleetPredictor:
    """Decides by the workers' reports."""

    def __init__(
        self,
        fleet: Fleet,
        view: PlacementView,
        traffic: TrafficFeed,
        load: LoadFeed,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``traffic``: tells how popular each expert is; ``load``: arrivals and costs."""
        self._fleet, self._view, self._traffic, self._load = fleet, view, traffic, load
        self._wall_clock = wall_clock
        self._shape: FleetShape | None = None
        self._changed_s = 0.0
        self._measured: FleetShape | None = None

    def demand(self, policy: ScalingPolicy) -> RecentDemand:
        """Return the demand of the part of the policy's window that all reporting workers have
        covered.
        """
        now_s, reports = self._wall_clock(), self._load.recent(policy.window_s)
        telling = [each for each in active_attention(self._fleet) if self._load.heard([each])]
        spans = covered_spans(reports, telling, now_s, policy.window_s)
        told_s = sum(end - begin for begin, end in spans)
        if not told_s:
            return NO_DEMAND
        arrivals = without_gaps(reported_arrivals(reports), spans, now_s)
        answers = [each.answer_tokens for each in arrivals if each.answer_tokens > 0]
        usual = sum(answers) / len(answers) if answers else USUAL_ANSWER_TOKENS
        return recent_demand(arrivals, now_s, told_s, usual)

    async def choose(self, policy: ScalingPolicy, state: ScalingState) -> ScalingChoice | None:
        """Return a shape that would be better than the present one; shapes are tried off the event
        loop.

        None while a new leader still reads earlier reports.
        """
        if not self._load.is_caught_up:
            return None
        scaler = Scaler(self.times(), self.limits())
        return await asyncio.to_thread(scaler.decide, policy, state)

    def times(self) -> ServingTimes | None:
        """Predict steps by what was measured; None while too little is known."""
        current, model, measured = self._view.current, self._load.model(), self._measured_shape()
        if not any(record.role == "expert" for record in self._fleet.workers.values()):
            return self._times_of_whole_steps(model)
        if current is None or not {"attention", "experts"} <= model.parts.keys():
            # Whole steps would not tell the sides apart.
            return None
        traffic = self._traffic.of(current.model_digest)
        layers = list(traffic.statistics.layers.values()) if traffic else []
        seen = [layer for layer in layers if layer.rows > 0 and layer.batches > 0]
        row_bytes = max((record.row_bytes for record in self._fleet.workers.values()), default=0)
        if not seen:
            return None
        chosen = np.stack([layer.tokens / layer.rows for layer in seen])
        rows = sum(layer.rows for layer in seen) / sum(layer.batches for layer in seen)
        served = self._traffic.served(current)
        try:
            return ServingTimes(
                model,
                num_moe_layers=len(current.layers),
                num_experts=chosen.shape[1],
                top_k=max(1, round(float(chosen.sum(axis=1).mean()))),
                row_bytes=row_bytes,
                activated=activated_of(
                    chosen, unevenness(chosen, rows, served, len(current.workers))
                ),
                measured=measured,
            )
        except InvalidInput:  # parts that it needs were not measured yet
            return None

    def _measured_shape(self) -> FleetShape:
        """Find the shape whose whole steps the costs are of: the one before, for a while after a change."""
        shape, now_s = active_shape(self._fleet), self._wall_clock()
        if shape != self._shape:
            self._shape, self._changed_s = shape, now_s
        if self._measured is None or now_s - self._changed_s >= STEPS_FADE_S:
            self._measured = shape
        return self._measured

    def _times_of_whole_steps(self, model: PerformanceModel) -> ServingTimes | None:
        """Predict steps of workers that have their own experts, or have lost all expert workers."""
        told = [record for record in self._fleet.workers.values() if record.top_k]
        if not told or "step" not in model.parts:
            return None
        num_experts, top_k = told[0].num_experts, told[0].top_k
        # Sums of parts would need the layers of a placement.
        whole = PerformanceModel(parts={"step": model.parts["step"]})
        return ServingTimes(
            whole,
            num_moe_layers=1,
            num_experts=num_experts,
            top_k=top_k,
            row_bytes=0,
            activated=activated_of(np.full((1, num_experts), top_k / num_experts), uneven=1.0),
        )

    def limits(self) -> ServingLimits:
        """Take the limits of the attention worker that has least."""
        told = [
            record
            for record in self._fleet.workers.values()
            if record.role == "attention" and record.max_num_seqs
        ]
        if not told:
            return ServingLimits()
        return ServingLimits(
            max_num_seqs=min(record.max_num_seqs for record in told),
            max_num_batched_tokens=min(record.max_num_batched_tokens for record in told),
            kv_tokens=min(record.kv_tokens for record in told),
            step_target_s=max(record.step_target_s for record in told),
        )


def activated_of(chosen: NDArray[np.float64], uneven: float) -> Activated:
    """Make the estimate of activated experts on the expert worker that has most of them.

    Rows are assumed to choose independently, each expert as often as it was chosen recently.

    Args:
        chosen: ``[L, E]``: share of the rows that chose each expert, by layer.
        uneven: most of any worker, divided by the mean.
    """
    # Of the chance that one row leaves it out.
    spared = np.log1p(-np.clip(chosen, 0.0, 1.0 - 1e-9))

    def activated(num_workers: int, rows: float) -> float:
        if rows <= 0:
            return 0.0
        active = float((1.0 - np.exp(spared * rows)).sum(axis=1).mean())
        return max(min(1.0, active), min(active, active / num_workers * uneven))

    return activated


def unevenness(
    chosen: NDArray[np.float64], rows: float, served: tuple[int, int] | None, num_workers: int
) -> float:
    """Measure how many more experts are activated on the worker that has most than in the mean.

    Args:
        chosen: see ``activated_of``.
        rows: rows of a usual batch.
        served: batches, and the sum of most activated experts on one worker; None: not known.
        num_workers: number of workers that served them.
    """
    if served is None or not served[0] or num_workers < 1:
        return 1.0
    mean = activated_of(chosen, 1.0)(1, rows) / num_workers
    return max(1.0, served[1] / served[0] / mean) if mean > 0 else 1.0
