"""Proposals of another shape, each from one cause; none knows of actions before."""

import math
from dataclasses import dataclass

from moesaic.messages.scaling import FleetShape, ScalingCause, ScalingPolicy
from moesaic.scaling.assessment import Assessment, within
from moesaic.scaling.candidates import shape_cost

CALM_MARGIN = 0.1  # of load, by which fewer workers must do more than their headroom
CHANCE = 3.0  # standard deviations
MOST_MARGIN = 0.5
LEAST_WINDOW = 0.5  # of the policy's, that must have been seen before workers go
GROWTH = 0.1  # of a side, where costs did not foresee that it is too small


@dataclass(frozen=True)
class ShapeProposal:
    """A shape, and its reason for people."""

    cause: ScalingCause
    wanted: FleetShape
    reason: str


def into_bounds(found: Assessment) -> ShapeProposal | None:
    """Propose the nearest shape within bounds, if the fleet is outside them, or would leave the policy's numbers."""
    state, action = found.state, found.state.action
    outside = state.shape
    if within(state.bounds, outside) == outside:
        if action is None or found.policy.mode != "auto" or _allows(found.policy, action.shape):
            return None
        outside = action.shape
    if action is not None and found.policy.mode == "auto" and action.shape == found.goal:
        # Under way
        return None
    bounds = f"{state.bounds.least} to {state.bounds.most}"
    return ShapeProposal("bounds", found.goal, f"{outside} is not within {bounds}")


def more(found: Assessment) -> ShapeProposal | None:
    """Propose the cheapest shape that is predicted to meet the targets, where they are missed or will be."""
    goal, headroom = found.goal, found.policy.headroom
    if found.attains(goal, headroom):
        return _unforeseen(found)
    wanted = found.cheapest(found.state.bounds, headroom)
    is_enough = wanted is not None
    wanted = wanted or found.best_attainable(headroom)
    if wanted is None or wanted == goal:
        return None
    before = _attainment(found, goal, headroom)
    after = f"{_attainment(found, wanted, headroom)} by {wanted}"
    reason = (
        f"at {headroom:g} times {found.state.demand.requests_per_s:.3g} requests/s, {goal} is predicted"
        f" to serve {before} of them in time, {after}"
    )
    if not is_enough:
        reason += f"; {found.target:.0%} cannot be reached within bounds"
    return ShapeProposal("load" if found.lacks_part else "slo", wanted, reason)


def fewer(found: Assessment) -> ShapeProposal | None:
    """Propose the cheapest shape that meets the targets with a margin, if that saves enough and all is calm."""
    policy, state = found.policy, found.state
    if found.measured_missed or found.queue_grows or found.is_degraded or not found.is_settled:
        return None
    if not state.heard or state.demand.window_s < LEAST_WINDOW * policy.window_s:
        # What was not told is no calm.
        return None
    cost = shape_cost(policy, found.goal)
    headroom = policy.headroom * (1 + calm_margin(len(state.demand)))
    below = cost * (1 - max(policy.gain, 1e-6))
    target = calm_target(found.target, len(state.demand))
    wanted = found.cheapest(state.bounds, headroom, target, below)
    if wanted is None or cost <= 0:
        return None
    saved = 1 - shape_cost(policy, wanted) / cost
    load = f"{headroom:.3g} times {state.demand.requests_per_s:.3g} requests/s"
    return ShapeProposal(
        "cost",
        wanted,
        f"{wanted} costs {saved:.0%} less than {found.goal}, and is predicted to serve"
        f" {_attainment(found, wanted, headroom)} of {load} in time",
    )


def one_more(found: Assessment) -> ShapeProposal | None:
    """Propose one worker more where costs are not known, by what is late; never fewer.

    First tokens wait on attention workers, where prompts queue and their KV is. Later tokens wait in each layer
    for the experts, whose weights are read for however few rows.
    """
    state = found.state
    if not found.is_settled:
        return None
    targets = state.objectives
    first = (state.ttft_p90_s or 0.0) / targets.ttft_s
    later = (state.tpot_p90_s or 0.0) / targets.tpot_s
    if found.queue_grows:
        why, is_attention = f"{state.waiting} requests wait", True
    elif found.measured_missed:
        is_attention = first >= later
        share, tokens = (first, "first") if is_attention else (later, "later")
        why = f"{state.attainment or 0:.0%} of the requests are in time, and {tokens} tokens take {share:.1f} of the"
        why += " target"
    elif found.is_degraded:
        is_attention = state.thresholds[0] <= state.thresholds[1]
        prefill, decode = state.thresholds
        why = (
            f"brownout has its thresholds at {prefill:.2f} for prompts and {decode:.2f} for answers"
        )
    else:
        return None
    wanted = _grown(found, 1 if is_attention else 0, 0 if is_attention else 1)
    if wanted is None:
        return None
    cause: ScalingCause = "queue" if found.queue_grows else "slo"
    return ShapeProposal(cause, wanted, f"{why}; costs are not known yet, so one worker is added")


def calm_margin(num_requests: int) -> float:
    """Return the part by which load may be underestimated: by chance, the more the fewer requests there were."""
    chance = CHANCE / math.sqrt(num_requests) if num_requests else MOST_MARGIN
    return max(CALM_MARGIN, min(MOST_MARGIN, chance))


def calm_target(target: float, num_requests: int) -> float:
    """Return the attainment that others of so many requests are sure to have, if these have it: half-way to 1 at most.

    Where load matters little, such as where long prompts delay the tokens of others, this is what steadies choices.
    """
    chance = CHANCE * math.sqrt(target * (1 - target) / max(1, num_requests))
    return min(target + chance, (1 + target) / 2)


def _unforeseen(found: Assessment) -> ShapeProposal | None:
    """Propose more workers of the busier side where targets are missed though they should not be."""
    if not found.is_settled or not (found.measured_missed or found.queue_grows):
        return None
    goal, state = found.goal, found.state
    predicted = found.forecast(goal, found.policy.headroom)
    attention, experts = predicted.attention_busy, predicted.experts_busy
    by = math.ceil(GROWTH * (goal.attention if attention >= experts else goal.experts))
    wanted = _grown(found, *((by, 0) if attention >= experts else (0, by)))
    if wanted is None:
        return None
    cause: ScalingCause = "slo" if found.measured_missed else "queue"
    symptom = f"{state.waiting} requests wait"
    if found.measured_missed:
        symptom = f"{state.attainment or 0:.0%} of the requests are in time"
    return ShapeProposal(
        cause,
        wanted,
        f"{symptom}, though {goal} is predicted to serve {predicted.attainment:.1%} so: more on the side that is"
        f" busier (attention {attention:.0%}, experts {experts:.0%})",
    )


def _grown(found: Assessment, attention: int, experts: int) -> FleetShape | None:
    """Add workers of one side, or of the other one where bounds forbid it."""
    goal, bounds = found.goal, found.state.bounds
    for a, e in ((attention, experts), (experts, attention)):
        wanted = within(bounds, FleetShape(goal.attention + a, goal.experts + e))
        if wanted != goal:
            return wanted
    return None


def _attainment(found: Assessment, shape: FleetShape, headroom: float) -> str:
    return f"{found.forecast(shape, headroom).attainment:.1%}" if found.can_serve(shape) else "none"


def _allows(policy: ScalingPolicy, shape: FleetShape) -> bool:
    return policy.min_attention <= shape.attention <= (
        policy.max_attention or shape.attention
    ) and policy.min_experts <= shape.experts <= (policy.max_experts or shape.experts)
