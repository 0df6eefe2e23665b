"""Times of steps, demands and states that tests of scaling are made of."""

from dataclasses import dataclass

import numpy as np

from moesaic.messages.scaling import FleetShape, ScalingAction
from moesaic.scaling.contract import (
    Objectives,
    RecentDemand,
    ScalingState,
    ShapeBounds,
    StepRows,
    StepTime,
)


@dataclass(frozen=True)
class EvenTimes:
    """Steps that take no less time with more rows, and no more with more workers.

    Powers of two as seconds make sums exact, in whatever order they are added up.
    """

    step_s: float = 2.0**-6
    row_s: float = 2.0**-12
    key_s: float = 2.0**-20
    prompt_key_s: float = 0.0
    experts_s: float = 0.0  # of one expert worker, if it were alone; for each row

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        keys_s = self.key_s * rows.keys + self.prompt_key_s * rows.prompt_keys
        attention_s = self.step_s + self.row_s * rows.rows + keys_s
        experts_s = self.experts_s * rows.rows / max(1, shape.experts)
        return StepTime(attention_s + experts_s, attention_s, experts_s)


def demand_of(requests: list[tuple[float, int, int]], window_s: float = 16.0) -> RecentDemand:
    """Make a demand of times, tokens of prompts and tokens of answers."""
    rows = sorted(requests, key=lambda request: request[0])
    return RecentDemand(
        at_s=np.array([row[0] for row in rows], dtype=np.float64),
        prompt_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        answer_tokens=np.array([row[2] for row in rows], dtype=np.int64),
        window_s=window_s,
    )


def steady_demand(
    per_s: float, window_s: float = 120.0, prompt: int = 64, answer: int = 16
) -> RecentDemand:
    """Make a demand of alike requests at even intervals."""
    number = round(per_s * window_s)
    return demand_of([((i + 0.5) / per_s, prompt, answer) for i in range(number)], window_s)


def bounds_of(least: tuple[int, int], most: tuple[int, int]) -> ShapeBounds:
    return ShapeBounds(FleetShape(*least), FleetShape(*most))


def state_of(
    shape: FleetShape,
    demand: RecentDemand,
    bounds: ShapeBounds,
    objectives: Objectives,
    *,
    now_s: float = 1000.0,
    action: ScalingAction | None = None,
    attainment: float | None = None,
    ttft_p90_s: float | None = None,
    tpot_p90_s: float | None = None,
    waiting: int = 0,
    thresholds: tuple[float, float] = (1.0, 1.0),
) -> ScalingState:
    """Make a state in which nothing was measured, unless told."""
    return ScalingState(
        now_s=now_s,
        shape=shape,
        action=action,
        bounds=bounds,
        demand=demand,
        objectives=objectives,
        attainment=attainment,
        ttft_p90_s=ttft_p90_s,
        tpot_p90_s=tpot_p90_s,
        waiting=waiting,
        thresholds=thresholds,
    )
