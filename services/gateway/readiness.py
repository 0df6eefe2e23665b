"""Readiness: the checks that fail while requests cannot be answered."""

from moesaic.errors import ExpertUnavailable, MoesaicError, NotReady
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.coverage import unserved_experts

Lacks = dict[str, MoesaicError]
"""Failing checks by name, each with the error that a request gets meanwhile."""


def lacks(draining: bool, dispatches: list[str], lacking_experts: Lacks) -> Lacks:
    """Find the failing checks; none when ready.

    Args:
        draining: this gateway is about to stop.
        dispatches: dispatch mode of each attention worker that takes requests.
        lacking_experts: the last result of ``lacking_experts``.
    """
    failing: Lacks = {}
    if draining:
        failing["gateway"] = NotReady("the gateway is draining", code="draining")
    if not dispatches:
        what = "no attention worker is ready"
        failing["attention_workers"] = NotReady(what, code="no_attention_worker")
    elif set(dispatches) == {"routed"}:
        failing |= lacking_experts
    return failing


def lacking_experts(placement: Placement | None, records: dict[str, WorkerRecord]) -> Lacks:
    """Find what keeps expert workers from serving every expert, or a united one in its place.

    Args:
        placement: the committed placement, if there is one.
        records: all workers in the registry; the last view of it holds while Redis is gone.
    """
    if placement is None:
        what = "no placement is committed: the experts have no slots yet"
        return {"placement": NotReady(what, code="placement_changing")}
    live = {(r.worker_id, r.generation) for r in records.values() if r.holds_experts}
    for layer, experts in unserved_experts(placement, live).items():
        return {"experts": ExpertUnavailable(layer, len(experts))}
    return {}
