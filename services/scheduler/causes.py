"""Causes of decisions, as the log has them: the fields of a ``PlacementDecision`` for each."""

from collections.abc import Mapping
from typing import Any

from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.moves import moves
from moesaic.placement.decide.stand_ins import own_part
from moesaic.services.scheduler.planning.planner import PlacementPlan


def by_traffic(plan: PlacementPlan, *, adopted: bool) -> dict[str, Any]:
    """Fields for a plan that is carried out, or one to stay."""
    return {
        "cause": "traffic",
        "adopted": adopted,
        "reason": plan.reason,
        "policy": plan.policy,
        "epoch_before": plan.base_epoch,
        "moves": len(plan.moves),
        "moved_bytes": plan.moved_bytes,
        "batches": plan.batches,
        "sampled_batches": plan.sampled_batches,
        "predicted_before": plan.before,
        "predicted_after": plan.after,
        "predicted_s": plan.seconds,
        "local_share_before": plan.local_share_before,
        "local_share_after": plan.local_share_after,
        "row_s_before": plan.row_s_before,
        "row_s_after": plan.row_s_after,
    }


def by_operator(
    current: Placement, wanted: Placement, known: Mapping[str, WorkerRecord]
) -> dict[str, Any]:
    """Fields for a placement or pins that an operator asked for."""
    return {
        "cause": "operator",
        "adopted": True,
        "reason": "an operator asked for it",
        "epoch_before": current.epoch,
        **_loading(current, wanted, known),
    }


def by_substitution(
    current: Placement, wanted: Placement, known: Mapping[str, WorkerRecord]
) -> dict[str, Any]:
    """Fields for another way to degrade, which an operator asked for."""
    substitution = wanted.substitution
    united = (
        f"united experts of every {substitution.way}"
        if wanted.num_united
        else f"{substitution.instead} experts"
    )
    loading = _loading(own_part(current), wanted, known)
    reason = f"choices are to be degraded by {united}, by {substitution.rule}"
    return {**by_operator(current, wanted, known), "reason": reason, **loading}


def by_workers(
    current: Placement | None, wanted: Placement, known: Mapping[str, WorkerRecord]
) -> dict[str, Any]:
    """Fields for a placement that the coming and going of workers makes necessary."""
    before = {worker.worker_id for worker in current.workers} if current else set()
    after = {worker.worker_id for worker in wanted.workers}
    came, left = sorted(after - before), sorted(before - after)
    full = [name for name, held in _held(current).items() if _lacks_room(known.get(name), held)]
    what = ((came, "came"), (left, "left"), (full, "has less room than its experts need"))
    changes = [f"{', '.join(names)} {verb}" for names, verb in what if names]
    return {
        "cause": "workers",
        "adopted": True,
        "reason": "; ".join(changes) or "a worker was started again or forgot its placement",
        "epoch_before": current.epoch if current else 0,
        **_loading(current, wanted, known),
    }


def _held(placement: Placement | None) -> dict[str, int]:
    """Count each worker's experts."""
    workers = placement.workers if placement else []
    return {
        worker.worker_id: sum(e != EMPTY_SLOT for layer in placement.slots for e in layer[idx])
        for idx, worker in enumerate(workers)
        if placement
    }


def _lacks_room(record: WorkerRecord | None, num_held: int) -> bool:
    """True of an edge agent whose memory was limited to less."""
    return record is not None and bool(record.num_slots) and num_held > record.capacity


def _loading(
    current: Placement | None, wanted: Placement, known: Mapping[str, WorkerRecord]
) -> dict[str, int]:
    needed = moves(current, wanted)
    names = [worker.worker_id for worker in wanted.workers]
    expert_bytes = max((known[name].expert_bytes for name in names if name in known), default=0)
    return {"moves": len(needed), "moved_bytes": len(needed) * expert_bytes}
