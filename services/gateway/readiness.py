"""Whether requests can be answered now, and what is missing if not."""

from moesaic.errors import ExpertUnavailable, MoesaicError, NotReady
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.coverage import missing_experts
from services.gateway.workers import Worker


def lacks(
    draining: bool,
    workers: list[Worker],
    placement: Placement | None,
    records: dict[str, WorkerRecord],
) -> dict[str, MoesaicError]:
    """The failing checks by name, each with the error that a request gets meanwhile; empty when ready.

    Args:
        draining: this gateway is about to stop.
        workers: attention workers that take requests.
        placement: the committed placement, if there is one.
        records: everyone in the registry; the last view of it holds while Redis is gone.
    """
    failing: dict[str, MoesaicError] = {}
    if draining:
        failing["gateway"] = NotReady("the gateway is draining", code="draining")
    if not workers:
        failing["attention_workers"] = NotReady(
            "no attention worker is ready", code="no_attention_worker"
        )
    elif not any(worker.record.dispatch == "local" for worker in workers):
        failing |= _lacking_experts(placement, records)
    return failing


def _lacking_experts(
    placement: Placement | None, records: dict[str, WorkerRecord]
) -> dict[str, MoesaicError]:
    if placement is None:
        what = "no placement is committed: the experts have no slots yet"
        return {"placement": NotReady(what, code="placement_changing")}
    live = {(r.worker_id, r.generation) for r in records.values() if r.role == "expert"}
    missing = missing_experts(placement, live)
    if missing:
        layer, experts = next(iter(missing.items()))
        return {"experts": ExpertUnavailable(layer, len(experts))}
    return {}
