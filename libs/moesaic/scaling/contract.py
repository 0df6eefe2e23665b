"""The words of scaling: demand, targets, and what a fleet of a shape is predicted to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scaling import FleetShape, ScalingAction, ScalingCause, ScalingForecast


@dataclass(frozen=True)
class RecentDemand:
    """Requests that arrived within a window, in the order of their arrival.

    Attributes:
        at_s: float64 ``[n]``, seconds since the window began.
        prompt_tokens: int64 ``[n]``, to be computed: without those that a prefix cache has.
        answer_tokens: int64 ``[n]``; 1 for requests that are only scored.
        window_s: length of the window.
    """

    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    answer_tokens: NDArray[np.int64]
    window_s: float

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.at_s)

    @property
    def requests_per_s(self) -> float:
        """Mean rate of arrivals."""
        return len(self) / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True)
class Objectives:
    """Targets of latency, and the part of the requests that shall meet both."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9


@dataclass(frozen=True)
class StepRows:
    """The rows of one forward pass of one attention worker.

    Attributes:
        prompt_rows: tokens of prompts.
        answer_rows: generations that get a token.
        keys: keys that the rows of generations see together.
        prompt_keys: keys that the rows of prompts see together.
    """

    prompt_rows: float
    answer_rows: float
    keys: float
    prompt_keys: float = 0.0

    @property
    def rows(self) -> float:
        """Rows of both phases."""
        return self.prompt_rows + self.answer_rows


@dataclass(frozen=True)
class StepTime:
    """Seconds of one forward pass, and how long it keeps each side busy.

    Attributes:
        seconds: from its begin to its end, waiting for expert workers included.
        attention_s: part of it in which an attention worker computes.
        experts_s: an expert worker computes, the one that has most to do.
        error_s: one standard error.
    """

    seconds: float
    attention_s: float
    experts_s: float
    error_s: float = 0.0


class StepTimes(Protocol):
    """Seconds of steps of a fleet of one shape."""

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        """Predict one step of one attention worker, the others having alike steps at the same time."""
        ...


@dataclass(frozen=True)
class ServingLimits:
    """Limits of an attention worker, as ``EngineLimits`` has them.

    Attributes:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: rows in one step.
        kv_tokens: tokens that its KV blocks hold.
        step_target_s: most seconds of a step, about, which limit the rows of prompts; 0: no limit.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 1 << 20
    step_target_s: float = 0.0


@dataclass(frozen=True)
class ShapeBounds:
    """Shapes that a fleet may have."""

    least: FleetShape
    most: FleetShape

    def shapes(self) -> Sequence[FleetShape]:
        """All of them, in the order of attention and then of expert workers."""
        return [
            FleetShape(attention, experts)
            for attention in range(self.least.attention, self.most.attention + 1)
            for experts in range(self.least.experts, self.most.experts + 1)
        ]


@dataclass(frozen=True)
class ScalingState:
    """Facts that a decision is made from.

    Attributes:
        now_s: time by a monotonic clock, or by one that all schedulers share.
        shape: active workers.
        action: the last action; None: there was none.
        bounds: shapes that the policy allows and the actuator can bring.
        demand: demand of the last seconds.
        objectives: targets.
        attainment: part of the requests that met both since the last action; None if too few ended.
        ttft_p90_s: recent 90th percentile of TTFT; None without first tokens.
        tpot_p90_s: recent 90th percentile of TPOT; None without later tokens.
        waiting: requests that have not begun.
        thresholds: thresholds of brownout, prefill and decode: the least of any worker.
        heard: every active attention worker has reported recently.
        intended: the shape that the actuator is set to, where no action tells it; None: not known.
    """

    now_s: float
    shape: FleetShape
    action: ScalingAction | None
    bounds: ShapeBounds
    demand: RecentDemand
    objectives: Objectives
    attainment: float | None = None
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None
    waiting: int = 0
    thresholds: tuple[float, float] = (1.0, 1.0)
    heard: bool = True
    intended: FleetShape | None = None


@dataclass(frozen=True)
class ScalingChoice:
    """A shape that would be better than the one there is.

    Attributes:
        cause: cause of the choice.
        wanted: the shape.
        allowed: it may be carried out now; else ``held`` has the reason.
        reason: reason, for people.
        held: reason why the action is not allowed, for people; empty if it is.
        bridged: targets are missed until it is there, or brownout keeps them meanwhile.
        forecast_before: forecast of the present shape; None if costs are unknown.
        forecast: forecast of the wanted shape.
    """

    cause: ScalingCause
    wanted: FleetShape
    allowed: bool
    reason: str
    held: str = ""
    bridged: bool = False
    forecast_before: ScalingForecast | None = None
    forecast: ScalingForecast | None = None
