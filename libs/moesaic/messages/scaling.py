"""Numbers of workers of the two sides: the policy of operators, the wanted shape, and decisions."""

import math
import re
from typing import Literal, get_args

import msgspec

from moesaic.errors import InvalidInput
from moesaic.messages.bounds import Count, Name, Number, SmallCount
from moesaic.messages.order import Order

ScalingMode = Literal["off", "advise", "auto"]
"""``off``: operators alone change numbers. ``advise``: decisions are only reported. ``auto``: they are carried out."""

SCALING_MODES: tuple[ScalingMode, ...] = get_args(ScalingMode)
MOST_WORKERS = 4096  # of a side


class FleetShape(msgspec.Struct, frozen=True, order=True):
    """Numbers of active workers of the two sides."""

    attention: SmallCount
    experts: SmallCount

    def __str__(self) -> str:
        """Return the text form of the paper: ``4A8E``."""
        return f"{self.attention}A{self.experts}E"

    @property
    def total(self) -> int:
        """Workers of both sides."""
        return self.attention + self.experts


def read_shape(text: str) -> FleetShape:
    """Read a shape in its text form: ``4A8E``.

    Raises:
        InvalidInput: ``text`` is no shape.
    """
    found = re.fullmatch(r"(\d{1,4})A(\d{1,4})E", text.strip().upper())
    if found is None:
        raise InvalidInput(
            "shape", f"must be like 2A4E: attention and expert workers, got {text!r}"
        )
    shape = FleetShape(int(found[1]), int(found[2]))
    if not 1 <= shape.attention <= MOST_WORKERS or shape.experts > MOST_WORKERS:
        raise InvalidInput(
            "shape", f"must be in 1A0E..{MOST_WORKERS}A{MOST_WORKERS}E, got {text!r}"
        )
    return shape


class ScalingPolicy(Order, frozen=True, kw_only=True, tag="scaling-policy.v1"):
    """Settings of operators; they outlive every scheduler.

    Attributes:
        mode: off (operators set the numbers of workers), advise (report better numbers) or auto (apply them).
        min_attention: smallest number of attention workers.
        max_attention: largest number of attention workers; 0: all available.
        min_experts: smallest number of expert workers.
        max_experts: largest number of expert workers; 0: all available.
        attention_cost: cost of one attention worker for an hour, in any unit.
        expert_cost: cost of one expert worker for an hour, in the same unit.
        slo_ttft_s: target for first tokens, in seconds; 0: that of the brownout policy.
        slo_tpot_s: target for later tokens, in seconds; 0: that of the brownout policy.
        attainment: share of requests that must meet both targets, such as 0.9.
        interval_s: seconds between decisions.
        cool_down_s: seconds from an action to the next; its reversal waits twice as long, unless a target is missed.
        window_s: seconds of recorded arrivals to replay.
        headroom: factor on the rate of replayed arrivals, for growth until the next decision.
        gain: smallest share of the cost that removing workers must save.
    """

    mode: ScalingMode = "off"
    min_attention: int = 1
    max_attention: int = 0
    min_experts: int = 1
    max_experts: int = 0
    attention_cost: float = 1.0
    expert_cost: float = 1.0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    attainment: float = 0.9
    interval_s: float = 10.0
    cool_down_s: float = 60.0
    window_s: float = 120.0
    headroom: float = 1.2
    gain: float = 0.02

    def checked(self) -> "ScalingPolicy":
        """Return the policy itself, if it makes sense.

        Raises:
            InvalidInput: names the first wrong field, and its allowed values.
        """
        if self.mode not in SCALING_MODES:
            raise InvalidInput(
                "mode", f"must be one of {', '.join(SCALING_MODES)}, got {self.mode!r}"
            )
        for field, (least, most) in _BOUNDS.items():
            value = getattr(self, field)
            if not (math.isfinite(value) and least <= value <= most):
                raise InvalidInput(field, f"must be in {least:g}..{most:g}, got {value:g}")
        for side in ("attention", "experts"):
            fewest, most_ = getattr(self, f"min_{side}"), getattr(self, f"max_{side}")
            if most_ and most_ < fewest:
                raise InvalidInput(
                    f"max_{side}", f"must be 0 for any, or at least min_{side}, which is {fewest}"
                )
        return self


_BOUNDS: dict[str, tuple[float, float]] = {
    "min_attention": (1, MOST_WORKERS),
    "max_attention": (0, MOST_WORKERS),
    "min_experts": (0, MOST_WORKERS),
    "max_experts": (0, MOST_WORKERS),
    "attention_cost": (0.0, 1e6),
    "expert_cost": (0.0, 1e6),
    "slo_ttft_s": (0.0, 3600.0),
    "slo_tpot_s": (0.0, 3600.0),
    "attainment": (0.01, 0.999),
    "interval_s": (0.5, 86400.0),
    "cool_down_s": (0.0, 86400.0),
    "window_s": (1.0, 86400.0),
    "headroom": (1.0, 10.0),
    "gain": (0.0, 1.0),
}


class ScalingAction(Order, frozen=True, kw_only=True, tag="scaling-action.v1"):
    """The wanted shape, as the last action left it; it outlives every scheduler.

    Attributes:
        number: counts actions, from 1, so that a later leader repeats nothing; 0: no shape was wanted yet.
        shape: the wanted shape.
        decision_id: id of the decision behind it.
        at: seconds since 1970 by the scheduler's clock.
        up: true if the last action added workers, false if it removed some; absent: neither.
        seconds: time until the shape was reached; absent: not yet.
        failure: reason why it was given up or superseded.
    """

    number: Count
    shape: FleetShape
    decision_id: Name = ""
    at: Number = 0.0
    up: bool | None = None
    seconds: Number | None = None
    failure: str = ""

    @property
    def ended(self) -> bool:
        """True once its shape was reached or given up."""
        return self.seconds is not None or bool(self.failure)


ScalingCause = Literal["slo", "queue", "load", "cost", "bounds", "operator"]
"""``slo``: targets are missed, or will be. ``queue``: requests wait. ``load``: a part of the fleet is gone or new.
``cost``: fewer workers suffice. ``bounds``: the policy's numbers have changed."""


class ScalingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions for one shape, by a replay of recent arrivals.

    Attributes:
        shape: the shape.
        cost: cost of the shape for an hour.
        attainment: part of the requests that meet both targets.
        ttft_p90_s: 90th percentile of TTFT.
        tpot_p90_s: 90th percentile of TPOT.
        attention_busy: part of the time in which attention workers compute.
        experts_busy: likewise for expert workers.
    """

    shape: FleetShape
    cost: float = 0.0
    attainment: float = 0.0
    ttft_p90_s: float = 0.0
    tpot_p90_s: float = 0.0
    attention_busy: float = 0.0
    experts_busy: float = 0.0


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True, tag="scaling-decision.v1"):
    """One decision with its reason; it is reported again, under the same id, with its result.

    Attributes:
        decision_id: unique id of the decision.
        at: seconds since 1970 by the scheduler's clock, for people.
        cause: cause of the decision.
        adopted: the wanted shape was changed; else the policy only advises, or a cool-down prevents the change.
        reason: reason, for people.
        before: the shape at the time.
        wanted: the shape decided for.
        requests_per_s: requests that arrived recently.
        forecast_before: forecast of ``before``; absent if costs are unknown.
        forecast: forecast of ``wanted``.
        measured_attainment: recent attainment; absent without requests.
        measured_ttft_p90_s: recent 90th percentile of TTFT.
        measured_tpot_p90_s: recent 90th percentile of TPOT.
        prefill_threshold: threshold of brownout at the time.
        decode_threshold: likewise.
        bridged: brownout degrades until the workers have come.
        seconds: time until the shape was reached; absent: not yet.
        failure: reason why it was not reached.
    """

    decision_id: Name
    at: Number = 0.0
    cause: ScalingCause = "slo"
    adopted: bool = False
    reason: str = ""
    before: FleetShape
    wanted: FleetShape
    requests_per_s: float = 0.0
    forecast_before: ScalingForecast | None = None
    forecast: ScalingForecast | None = None
    measured_attainment: float | None = None
    measured_ttft_p90_s: float | None = None
    measured_tpot_p90_s: float | None = None
    prefill_threshold: float = 1.0
    decode_threshold: float = 1.0
    bridged: bool = False
    seconds: float | None = None
    failure: str = ""
