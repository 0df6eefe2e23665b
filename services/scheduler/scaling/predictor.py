"""Demand and costs of the fleet, as ``moesaic.scaling`` wants them."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput
from moesaic.messages.scaling import ScalingPolicy
from moesaic.scaling.contract import (
    RecentDemand,
    ScalingChoice,
    ScalingState,
    ServingLimits,
)
from moesaic.scaling.decide import Scaler
from moesaic.scaling.demand import recent_demand, reported_arrivals
from moesaic.scaling.serving_times import Activated, ServingTimes
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.scaling.feed import LoadFeed

USUAL_ANSWER_TOKENS = 64.0  # while no answer has ended


class FleetPredictor:
    """Takes what the workers told, and decides by it."""

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

    def demand(self, policy: ScalingPolicy) -> RecentDemand:
        """Return the demand of the policy's window."""
        arrivals = reported_arrivals(self._load.recent(policy.window_s))
        answers = [each.answer_tokens for each in arrivals if each.answer_tokens > 0]
        usual = sum(answers) / len(answers) if answers else USUAL_ANSWER_TOKENS
        return recent_demand(arrivals, self._wall_clock(), policy.window_s, usual)

    async def choose(self, policy: ScalingPolicy, state: ScalingState) -> ScalingChoice | None:
        """Return a shape that would be better than the one there is; shapes are tried beside the loop."""
        scaler = Scaler(self._times(), self._limits())
        return await asyncio.to_thread(scaler.decide, policy, state)

    def _times(self) -> ServingTimes | None:
        """Predict steps by what was measured; None while too little is known."""
        current = self._view.current
        if current is None:
            return None
        traffic = self._traffic.of(current.model_digest)
        layers = traffic.statistics.layers.values() if traffic else []
        seen = [layer.tokens / layer.rows for layer in layers if layer.rows > 0]
        row_bytes = max((record.row_bytes for record in self._fleet.workers.values()), default=0)
        if not seen:
            return None
        chosen = np.stack(seen)
        try:
            return ServingTimes(
                self._load.model(),
                num_moe_layers=len(current.layers),
                top_k=max(1, round(float(chosen.sum(axis=1).mean()))),
                row_bytes=row_bytes,
                activated=activated_of(chosen),
            )
        except InvalidInput:  # parts that it needs were not measured yet
            return None

    def _limits(self) -> ServingLimits:
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
        )


def activated_of(chosen: NDArray[np.float64]) -> Activated:
    """Make the estimate of activated experts on one expert worker, the work being spread evenly.

    Rows are taken to choose on their own, each expert as often as it was chosen lately.

    Args:
        chosen: ``[L, E]``: part of the rows that chose each expert, by layer.
    """
    spared = np.log1p(-np.clip(chosen, 0.0, 1.0 - 1e-9))  # of the chance that one row leaves it out

    def activated(num_workers: int, rows: float) -> float:
        if rows <= 0:
            return 0.0
        active = float((1.0 - np.exp(spared * rows)).sum(axis=1).mean())
        return max(min(1.0, active), active / num_workers)

    return activated
