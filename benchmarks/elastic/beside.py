"""Figures beside the simulation: the paper's, and the decisions of the policy that serves."""

from dataclasses import replace
from typing import Any

import numpy as np

from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.scaling import Scaler
from moesaic.scaling.contract import Objectives, RecentDemand, ScalingState, ShapeBounds
from moesaic_lab.simulation.elastic.demand import DemandSeries
from moesaic_lab.simulation.elastic.fleets import FleetFamily

PAPER: dict[str, Any] = {
    "shapes": {"4": "1A6E", "16": "1A6E", "64": "1A8E", "256": "4A8E", "512": "8A14E"},
    "throughput": "up to 3.9 times SGLang's and 2.8 times DisAgg's a GPU (fig. 7)",
    "gpu_hours_ratio": "0.75 against 16, 32 or 64 GPUs, decisions every 30 minutes (fig. 9)",
}
WINDOW_S, EVERY_S, HEADROOM = 60.0, 1800.0, 1.2
MOST = FleetShape(32, 32)


def agreement_with_scaler(
    family: FleetFamily, demand: DemandSeries, objectives: Objectives, windows: int
) -> dict[str, Any]:
    """Let the policy that serves decide on some windows, and compare its shapes with the steady state's.

    It replays the arrivals of a minute, one by one, at every shape that it looks at.
    """
    fleet, times = family.ours, family.ours.times
    least, limits = times.least, times.limits(times.least)
    policy = ScalingPolicy(
        mode="auto",
        slo_ttft_s=objectives.ttft_s,
        slo_tpot_s=objectives.tpot_s,
        attainment=objectives.attainment,
        interval_s=EVERY_S,
        window_s=WINDOW_S,
        cool_down_s=0.0,
        headroom=HEADROOM,
    )
    scaler, pairs = Scaler(times, limits), list[tuple[FleetShape, FleetShape]]()
    for begin_s in np.linspace(EVERY_S, demand.span_s - WINDOW_S, windows):
        window = demand.part(float(begin_s), float(begin_s) + WINDOW_S)
        own = fleet.cheapest(window.rate(0.0, WINDOW_S) * HEADROOM, demand, objectives)
        assert own is not None
        state = ScalingState(
            now_s=0.0,
            shape=least,
            action=None,
            bounds=ShapeBounds(least, MOST),
            demand=_arrivals(window),
            objectives=objectives,
        )
        shape = least
        while (choice := scaler.decide(policy, replace(state, shape=shape))) and (
            choice.wanted.total > shape.total
        ):
            shape = choice.wanted
        pairs.append((own, shape))
    ratios: list[float] = [theirs.total / own.total for own, theirs in pairs]
    return {
        "windows": len(pairs),
        "same_number_of_gpus": sum(a.total == b.total for a, b in pairs),
        "scaler_gpus_over_steady": round(float(np.mean(ratios)), 3),
        "least_and_most": [round(min(ratios), 3), round(max(ratios), 3)],
        "shapes": "; ".join(f"{own} {theirs}" for own, theirs in pairs),
    }


def _arrivals(window: DemandSeries) -> RecentDemand:
    """Lay the requests of each bin evenly over it."""
    at_s = [
        (index + (number + 0.5) / count) * window.bin_s
        for index, count in enumerate(window.counts.astype(int).tolist())
        for number in range(count)
    ]
    ones = np.ones(len(at_s), np.int64)
    return RecentDemand(
        np.array(at_s),
        ones * round(window.prompt_tokens),
        ones * round(window.answer_tokens),
        window.span_s,
    )
