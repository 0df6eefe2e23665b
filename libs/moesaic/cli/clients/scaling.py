"""The policy of scaling, what is and what is wanted, and decisions; for people."""

from typing import TYPE_CHECKING

from moesaic.cli.clients.decisions import when

if TYPE_CHECKING:
    from moesaic.v1 import scheduler_pb2 as pb

DECISION_COLUMNS = ("when (UTC)", "cause", "from", "to", "result", "predicted", "measured")


def shape_text(shape: "pb.FleetShape") -> str:
    """Numbers of workers as the paper writes them, 2A4E."""
    return f"{shape.attention}A{shape.experts}E"


def policy_text(policy: "pb.ScalingPolicy") -> str:
    """The parts of a policy that people ask for, in a line."""
    parts = [f"mode {policy.mode}"]
    for side, least, most in (
        ("attention", policy.min_attention, policy.max_attention),
        ("expert", policy.min_experts, policy.max_experts),
    ):
        parts.append(f"{least} to {most or 'any number of'} {side} workers")
    targets = [
        f"{name} {seconds:g} s"
        for name, seconds in (("TTFT", policy.slo_ttft_s), ("TPOT", policy.slo_tpot_s))
        if seconds
    ]
    parts.append(
        f"{policy.attainment:.0%} within {', '.join(targets) or 'the targets of brownout'}"
    )
    parts.append(f"every {policy.interval_s:g} s, {policy.cool_down_s:g} s to cool down")
    return "; ".join(parts)


def state_text(found: "pb.GetScalingResponse") -> str:
    """The shape that there is, what there could be, and the last action, in lines."""
    bounds = ""
    if found.HasField("least"):
        bounds = f"; possible: {shape_text(found.least)} to {shape_text(found.most)}"
    lines = [f"{shape_text(found.shape)} now, by {found.actuator}{bounds}"]
    if found.HasField("action"):
        lines.append(f"action {found.action.number}: {action_text(found.action)}")
    if found.trouble:
        lines.append(f"trouble: {found.trouble}")
    return "\n".join(lines)


def action_text(action: "pb.ScalingAction") -> str:
    """The last action and its end."""
    return f"{shape_text(action.shape)} {_end(action)}"


def decision_row(decision: "pb.ScalingDecision") -> tuple[object, ...]:
    """A decision for a table with ``DECISION_COLUMNS``."""
    forecast = decision.forecast
    predicted = f"{forecast.attainment:.0%} in time" if decision.HasField("forecast") else ""
    known = decision.HasField("measured_attainment")
    return (
        when(decision),
        decision.cause,
        shape_text(decision.before),
        shape_text(decision.wanted),
        _end(decision) if decision.adopted else "advice",
        predicted,
        f"{decision.measured_attainment:.0%} in time" if known else "",
    )


def decision_note(decision: "pb.ScalingDecision") -> str:
    """The reason for a decision, brownout's help, and the failure if there was one."""
    bridged = ""
    if decision.bridged:
        thresholds = f"{decision.prefill_threshold:.2f}, {decision.decode_threshold:.2f}"
        bridged = f"bridged by brownout, thresholds {thresholds}"
    return "; ".join(filter(None, (decision.reason, bridged, decision.failure)))


def _end(action: "pb.ScalingAction | pb.ScalingDecision") -> str:
    if action.failure:
        return "failed"
    return f"after {action.seconds:.1f} s" if action.HasField("seconds") else "under way"
