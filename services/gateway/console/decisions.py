"""Decisions of the scheduler and of brownout in one form: the change, its predicted and its measured effect. Pure."""

from moesaic.services.gateway.console.state import BrownoutState, DecisionState, FleetState
from moesaic.v1 import scheduler_pb2 as pb

MOST_SHOWN = 40


def newest_first(
    placed: pb.GetDecisionsResponse,
    brownout: pb.GetBrownoutResponse,
    scaling: pb.GetScalingResponse,
) -> list[DecisionState]:
    """Put decisions of all kinds in one list, at most ``MOST_SHOWN``."""
    found = [
        *map(_placement, placed.decisions),
        *map(_brownout, brownout.decisions),
        *map(_scaling, scaling.decisions),
    ]
    return sorted(found, key=lambda each: each.at, reverse=True)[:MOST_SHOWN]


def brownout_state(found: pb.GetBrownoutResponse) -> BrownoutState:
    """Read the policy of brownout."""
    policy = found.policy
    return BrownoutState(
        mode=policy.mode,
        slo_ttft_s=policy.slo_ttft_s,
        slo_tpot_s=policy.slo_tpot_s,
        min_prefill_threshold=policy.min_prefill_threshold,
        min_decode_threshold=policy.min_decode_threshold,
    )


def fleet_state(found: pb.GetScalingResponse) -> FleetState:
    """Read the numbers of workers."""
    wanted = found.action.shape if found.HasField("action") else None
    return FleetState(
        mode=found.policy.mode,
        attention=found.shape.attention,
        experts=found.shape.experts,
        wanted_attention=wanted.attention if wanted else None,
        wanted_experts=wanted.experts if wanted else None,
        trouble=found.trouble,
    )


def _placement(found: pb.Decision) -> DecisionState:
    change = f"epoch {found.epoch_before} kept"
    if found.adopted:
        change = f"epoch {found.epoch_before} to {found.epoch or '…'}, {found.moves} moves"
    predicted = measured = ""
    if found.HasField("predicted_before") and found.HasField("predicted_after"):
        before, after = found.predicted_before, found.predicted_after
        predicted = f"{before:.2f} to {after:.2f} activated experts on the fullest worker"
    if found.HasField("measured_after"):
        measured = f"{found.measured_after:.2f} activated experts"
    if found.HasField("local_share_before") and found.HasField("local_share_after"):
        predicted = f"{found.local_share_before:.0%} to {found.local_share_after:.0%} at own site"
    if found.HasField("measured_local_share"):
        measured = f"{found.measured_local_share:.0%} at own site"
    return DecisionState(
        id=found.decision_id,
        kind="placement",
        at=found.at,
        cause=found.cause,
        change=change,
        adopted=found.adopted,
        reason="; ".join(filter(None, (found.reason, found.failure))),
        predicted=predicted,
        measured=measured,
    )


def _scaling(found: pb.ScalingDecision) -> DecisionState:
    predicted = measured = ""
    if found.HasField("forecast"):
        predicted = f"{found.forecast.attainment:.0%} of requests in time"
    if found.HasField("measured_attainment"):
        measured = f"{found.measured_attainment:.0%} of requests in time"
    return DecisionState(
        id=found.decision_id,
        kind="scaling",
        at=found.at,
        cause=found.cause,
        change=f"{_shape(found.before)} to {_shape(found.wanted)}",
        adopted=found.adopted,
        reason="; ".join(filter(None, (found.reason, found.failure))),
        predicted=predicted,
        measured=measured,
    )


def _brownout(found: pb.BrownoutDecision) -> DecisionState:
    def latencies(kind: str) -> str:
        told = {field.name: value for field, value in found.ListFields()}
        parts = [
            f"{name.upper()} {told[f'{kind}_{name}_s']:.3f} s"
            for name in ("ttft", "tpot")
            if f"{kind}_{name}_s" in told
        ]
        return ", ".join(parts)

    thresholds = (
        ("prefill", found.prefill_before, found.prefill),
        ("decode", found.decode_before, found.decode),
    )
    changes = [f"{name} {a:.2f} to {b:.2f}" for name, a, b in thresholds if a != b]
    if found.shedding:
        changes.append("new requests refused")
    return DecisionState(
        id=found.decision_id,
        kind="brownout",
        at=found.at,
        cause=found.worker_id,
        change=", ".join(changes) or "thresholds kept",
        adopted=True,
        reason="; ".join(filter(None, (found.reason, found.scale))),
        predicted=latencies("predicted"),
        measured=latencies("measured"),
    )


def _shape(shape: pb.FleetShape) -> str:
    return f"{shape.attention}A{shape.experts}E"
