"""Proposals for the fleet as it is, and a watch on workers that come, go and fail."""

import time
from collections.abc import Iterable
from itertools import chain

import structlog
from prometheus_client import Gauge

from moesaic.cluster.registry import Fleet
from moesaic.messages.placement import Incarnation, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.coverage import missing_experts
from moesaic.placement.decide.damping import Damping
from moesaic.placement.decide.proposal import Proposal, propose

log = structlog.get_logger()

_uncovered = Gauge("moesaic_experts_without_replica", "Experts that no live worker holds")


class FleetProposer:
    """Watches the workers, and proposes a placement when one is due.

    Attributes:
        known: the fleet at the last look.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.known: dict[str, WorkerRecord] = {}
        self._fleet = fleet
        self._damping = Damping()
        self._newcomers: dict[Incarnation, float] = {}  # not placed; when first seen

    def look(self) -> None:
        """Log the workers that came and left since the last look."""
        now = dict(self._fleet.workers)
        for event, here, there in (
            ("worker.joined", now, self.known),
            ("worker.left", self.known, now),
        ):
            for record in _incarnations_missing(here.values(), there.values()):
                log.info(
                    event,
                    worker_id=record.worker_id,
                    generation=record.generation,
                    role=record.role,
                    slots_per_layer=record.slots_per_layer,
                    model_digest=record.model_digest,
                )
        self.known = now

    def propose(self, current: Placement | None) -> Proposal:
        """Propose a placement for the present workers; see ``moesaic.placement.decide.proposal``.

        A worker that came back often or could not load is left out for a while, unless its slots are
        needed. If experts are missing, the proposal waits for no newcomer if the placed workers can hold them.
        """
        records, now_s = list(self._fleet.workers.values()), time.monotonic()
        experts = [record for record in records if record.holds_experts]
        live = {record.incarnation for record in experts}
        missing = missing_experts(current, live) if current else {}
        _uncovered.set(len(list(chain(*missing.values()))))
        placed = {w.incarnation for w in current.workers} if current else set()
        self._damping.note(experts, now_s)
        held_back = self._held_back_s(experts, placed, now_s)
        coming = {key for key in live - placed if key[0] not in held_back}
        self._newcomers = {key: self._newcomers.get(key, now_s) for key in coming}
        proposal = propose(current, [r for r in records if r.worker_id not in held_back])
        if held_back and proposal.short:
            # They are needed, however often they left.
            proposal = propose(current, records)
        if missing:
            known = [r for r in records if not r.holds_experts or r.incarnation in placed]
            alone = propose(current, known)
            proposal = alone if alone.placement is not None else proposal
        ways = {record.dispatch for record in records if record.takes_requests}
        if not experts and current is None and ways and not ways & {"", "routed"}:
            # No attention worker asks for expert workers.
            proposal.waiting_for.clear()
        proposal.waiting_for.extend(
            f"expert worker {worker_id}: came back often or cannot load, is placed in "
            f"{wait_s:.0f} s"
            for worker_id, wait_s in held_back.items()
        )
        return proposal

    def settled(self, settle_s: float) -> bool:
        """True if the last newcomer has been there for ``settle_s``."""
        latest_s = max(self._newcomers.values(), default=float("-inf"))
        return time.monotonic() - latest_s >= settle_s

    def could_not_load(self, workers: Iterable[Incarnation]) -> None:
        """Remember the workers that stopped a placement."""
        for worker_id, _ in workers:
            self._damping.note_failure(worker_id, time.monotonic())

    def _held_back_s(
        self, experts: Iterable[WorkerRecord], placed: set[Incarnation], now_s: float
    ) -> dict[str, float]:
        """Seconds for which workers that are not placed are still left alone, by worker id."""
        return {
            record.worker_id: wait_s
            for record in experts
            if record.incarnation not in placed
            and (wait_s := self._damping.held_back_s(record.worker_id, now_s)) > 0
        }


def _incarnations_missing(
    records: Iterable[WorkerRecord], elsewhere: Iterable[WorkerRecord]
) -> list[WorkerRecord]:
    there = {record.incarnation for record in elsewhere}
    return [record for record in records if record.incarnation not in there]
