"""The policy of brownout, the decisions under it and the state of workers, for people and for programs."""

import asyncio
from typing import TYPE_CHECKING, Any

from moesaic.cli.clients.decisions import as_dict, when

if TYPE_CHECKING:
    from moesaic.v1 import scheduler_pb2 as pb

WORKER_COLUMNS = (
    *("worker", "mode", "prefill", "decode", "TTFT P90", "TPOT P90", "shed", "choices degraded"),
)
DECISION_COLUMNS = ("when (UTC)", "worker", "prefill", "decode", "shed", "predicted", "measured")


async def brownout_of_workers(scheduler: str) -> dict[str, dict[str, Any]]:
    """Ask every attention worker that is registered for its state; those that do not answer are left out."""
    from moesaic.cli.clients.fleet import fleet_addresses

    fleet = await fleet_addresses(scheduler)
    workers = {name: address for name, (role, address) in fleet.items() if role == "attention"}
    found = await asyncio.gather(*map(_brownout_of, workers.values()))
    return {name: state for name, state in zip(workers, found, strict=True) if state is not None}


async def _brownout_of(address: str) -> dict[str, Any] | None:
    from moesaic.cli.clients.credentials import answer_if_any
    from moesaic.v1 import attention_pb2, attention_pb2_grpc

    stub, request = attention_pb2_grpc.AttentionServiceStub, attention_pb2.GetLoadRequest()
    load = await answer_if_any(address, stub, "GetLoad", request)
    return as_dict(load.brownout) if load is not None and load.HasField("brownout") else None


def policy_text(policy: "pb.BrownoutPolicy") -> str:
    """The parts of a policy that its mode goes by, in a line."""
    parts = [f"mode {policy.mode}"]
    if policy.mode == "manual":
        parts.append(f"thresholds {policy.prefill_threshold:g}, {policy.decode_threshold:g}")
    if policy.mode in ("paper", "auto"):
        parts.append(f"targets: TTFT {policy.slo_ttft_s:g} s, TPOT {policy.slo_tpot_s:g} s")
        least = policy.min_prefill_threshold, policy.min_decode_threshold
        parts.append("thresholds at least {:g}, {:g}".format(*least))
    united = f"united experts of {policy.way}" if policy.way else "fewer experts"
    return "; ".join([*parts, united, f"rule {policy.rule}"])


def worker_row(name: str, state: dict[str, Any]) -> tuple[object, ...]:
    """The state of a worker for a table with ``WORKER_COLUMNS``."""
    return (
        name,
        state["mode"] or "off",
        f"{state['prefill_threshold']:.2f}",
        f"{state['decode_threshold']:.2f}",
        _seconds(state.get("ttft_p90_s")),
        _seconds(state.get("tpot_p90_s")),
        f"{state['num_shed']}{', now' if state['shedding'] else ''}",
        f"{state['degraded_share']:.1%}",
    )


def decision_row(decision: "pb.BrownoutDecision") -> tuple[object, ...]:
    """A decision for a table with ``DECISION_COLUMNS``."""
    known = {field.name: value for field, value in decision.ListFields()}

    def latencies(kind: str) -> str:
        found = [known.get(f"{kind}_{name}_s") for name in ("ttft", "tpot")]
        return "" if found == [None, None] else " / ".join(map(_seconds, found))

    return (
        when(decision),
        decision.worker_id,
        f"{decision.prefill_before:.2f} -> {decision.prefill:.2f}",
        f"{decision.decode_before:.2f} -> {decision.decode:.2f}",
        f"{decision.refused}{', now' if decision.shedding else ''}",
        latencies("predicted"),
        latencies("measured"),
    )


def decision_note(decision: "pb.BrownoutDecision") -> str:
    """The reason for a decision, and its advice if there is any."""
    return "; ".join(filter(None, (decision.reason, decision.scale)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
