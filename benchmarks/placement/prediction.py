"""Predictions of the scheduler for a placement, beside its figures on the traffic that came, on recorded steps.

For each task set, a plan is made from the first half of the steps, as the scheduler makes one. A
layer has up to 256 sampled batches: policies see one half, and the other half is replayed. Then the
second half of the steps is served. Workers use the schedule for experts whose weights cost as much
as two rows, as the demo's do here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.evaluation.replay import ReplayMeans, replay
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import MAX_KEPT_SAMPLES
from moesaic.placement.traffic.trace import Trace
from moesaic_lab.placement.policies import ALL_POLICIES
from moesaic_lab.placement.trace_report import evenly, halves, traffic_of

CANDIDATES = ("eplb", "eplb-batches", "janus-batches")  # of the scheduler's policy ``auto``
RIDGE_ROWS = 2
FLEETS = {"3x14": (14,) * 3, "4x10": (10,) * 4}
WAYS: dict[str, ExpertScheduling] = {"as_served": "aebs", "experts_alone": "aebs-memory-bound"}


def predictions(trace: Trace, steps: int) -> dict[str, Any]:
    """Measure, for each fleet and way of replaying, the predicted figure over the later one, mean of the task sets.

    It is measured for the experts dealt round (``stay``) and for the plan (``move``).
    """
    return {
        fleet: {
            way: _compared([_of_part(trace, part, slots, how, steps) for part in trace.parts])
            for way, how in WAYS.items()
        }
        for fleet, slots in FLEETS.items()
    }


def _of_part(
    trace: Trace, part: str, slots: tuple[int, ...], how: ExpertScheduling, steps: int
) -> tuple[float, float, float]:
    """Predicted over later figure of staying and of the plan; and the part by which the plan is less, later."""
    own = replace(trace, steps=tuple(trace.selected([part])), parts=trace.parts)
    seen, later = (list(half) for half in halves(own, ("decode", "prefill", "mixed")))
    traffic = traffic_of(evenly(seen, MAX_KEPT_SAMPLES), trace.num_experts)
    problem = PlacementProblem(
        traffic=tuple(replace(layer, sampled=layer.sampled[::2]) for layer in traffic), slots=slots
    )
    placements = [ALL_POLICIES[name](problem) for name in ("uniform", *CANDIDATES)]
    judged = _replayed(placements, [layer.sampled[1::2] for layer in traffic], how)
    best = min(range(1, len(placements)), key=lambda at: judged[at].max_load)
    then = [layer.sampled for layer in traffic_of(evenly(later, steps), trace.num_experts)]
    stayed, moved = _replayed([placements[0], placements[best]], then, "aebs")
    return (
        judged[0].max_activated / stayed.max_activated,
        judged[best].max_activated / moved.max_activated,
        1 - moved.max_load / stayed.max_load,
    )


def _replayed(
    placements: Sequence[Sequence[Slots]],
    batches: Sequence[NDArray[np.uint16]],
    how: ExpertScheduling,
) -> list[ReplayMeans]:
    return replay(placements, batches, how, [RIDGE_ROWS] * len(placements[0][0]))


def _compared(parts: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    stay, move, less = (np.array(column) for column in zip(*parts, strict=True))
    return {
        "stay": round(float(stay.mean()), 3),
        "move": round(float(move.mean()), 3),
        "move_least": round(float(move.min()), 3),
        "move_largest": round(float(move.max()), 3),
        "less_work": round(float(less.mean()), 4),
    }
