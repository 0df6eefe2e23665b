"""The loop that keeps the placement what the fleet allows: decide, prepare, commit, confirm."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

import structlog
from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import MoesaicError, NotReady, StaleEpoch
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.coverage import missing_experts
from moesaic.placement.decision import Decision, Incarnation, decide, incarnation
from services.scheduler import workers
from services.scheduler.epochs import EpochStore

log = structlog.get_logger()

_LOOK_S = 1.0  # how often to look without news: newcomers settle, Redis may have lost its data
_BACKOFF_S = (1.0, 30.0)  # first and longest wait after a failed placement

_attempts = Counter("moesaic_migrations", "placements tried", ["outcome"])
_seconds = Histogram("moesaic_migration_seconds", "from plan to commit, of those that succeeded")
_uncovered = Gauge("moesaic_experts_without_replica", "experts that no live worker holds")


class Placer:
    """Owns the placement while its scheduler leads.

    Attributes:
        waiting_for: what keeps a placement from being committed, for people.
    """

    def __init__(
        self,
        fleet: Fleet,
        view: PlacementView,
        leadership: Leadership,
        epochs: EpochStore,
        *,
        settle_s: float,
        prepare_timeout_s: float,
    ) -> None:
        self.waiting_for: list[str] = []
        self._fleet, self._view, self._leadership, self._epochs = fleet, view, leadership, epochs
        self._settle_s, self._prepare_timeout_s = settle_s, prepare_timeout_s
        self._newcomers: dict[Incarnation, float] = {}  # not placed; when first seen
        self._confirmed: set[tuple[int, Incarnation]] = set()  # epochs in force on workers
        self._known: dict[str, WorkerRecord] = {}
        self._learned = False

    async def run(self) -> None:
        """Act on every change of the fleet, for ever."""
        backoff_s = _BACKOFF_S[0]
        while True:
            seen, pause_s = self._fleet.version, _LOOK_S
            try:
                await self._step()
                backoff_s = _BACKOFF_S[0]
            except MoesaicError as error:
                log.warning("placement.failed", cause=str(error), retry_after_s=backoff_s)
                self.waiting_for = [f"another attempt: {error}"]
                await asyncio.sleep(_BACKOFF_S[0])  # a fleet that changes all the time can wait too
                pause_s, backoff_s = backoff_s - _BACKOFF_S[0], min(2 * backoff_s, _BACKOFF_S[1])
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._fleet.changed(seen)

    async def _step(self) -> None:
        self._log_moves()
        if self._fleet.stale:
            self.waiting_for = ["redis"]
            return
        if not self._leadership.held:
            self.waiting_for = [f"the lead, which {self._leadership.leader or 'nobody'} has"]
            return
        await self._epochs.agree()
        decision = self._decide()
        if decision.proposal is not None and (decision.urgent or self._settled()):
            await self._place(decision.proposal)
            decision = self._decide()
        self.waiting_for = decision.waiting_for
        await self._confirm()

    def _decide(self) -> Decision:
        records, current = self._experts(), self._view.current
        live = {incarnation(record) for record in records}
        missing = missing_experts(current, live) if current else {}
        _uncovered.set(len(list(chain(*missing.values()))))
        placed = {(w.worker_id, w.generation) for w in current.workers} if current else set()
        self._newcomers = {key: self._newcomers.get(key, time.monotonic()) for key in live - placed}
        return decide(current, records)

    def _settled(self) -> bool:
        latest = max(self._newcomers.values(), default=float("-inf"))
        return time.monotonic() - latest >= self._settle_s

    async def _place(self, proposal: Placement) -> None:
        if self._view.current is None and not self._learned:
            await self._epochs.learn_from(self._fleet.workers.values())
            self._learned = True
        started = time.monotonic()
        placement = replace(proposal, epoch=await self._epochs.allocate())
        self.waiting_for = [f"workers to load placement {placement.epoch}"]
        log.info(
            "placement.planned",
            epoch=placement.epoch,
            workers=[worker.worker_id for worker in placement.workers],
            layers=len(placement.layers),
            num_experts=placement.num_experts,
        )
        try:
            await workers.prepare(placement, self._prepare_timeout_s)
        except MoesaicError as error:
            self._note_newer(error)
            await self._give_up(placement)
            raise
        try:
            await self._epochs.commit(placement)
        except NotReady:
            await self._give_up(placement)
            raise  # PeerLost is another matter: it may be committed, the next step will see
        seconds = time.monotonic() - started
        _attempts.labels("committed").inc()
        _seconds.observe(seconds)
        log.info("placement.committed", epoch=placement.epoch, seconds=round(seconds, 3))

    async def _give_up(self, placement: Placement) -> None:
        _attempts.labels("failed").inc()
        await workers.abort(placement)

    async def _confirm(self) -> None:
        """Put the committed placement in force wherever that has not been acknowledged."""
        current = self._view.current
        if current is None:
            return
        live = {incarnation(record) for record in self._experts()}
        self._confirmed = {done for done in self._confirmed if done[0] == current.epoch}
        pending = [
            worker
            for worker in current.workers
            if (key := (worker.worker_id, worker.generation)) in live
            and (current.epoch, key) not in self._confirmed
        ]
        results = await asyncio.gather(
            *(workers.confirm(worker, current, self._prepare_timeout_s) for worker in pending),
            return_exceptions=True,
        )
        for worker, result in zip(pending, results, strict=True):
            if result is None:
                self._confirmed.add((current.epoch, (worker.worker_id, worker.generation)))
        for error in results:
            if isinstance(error, StaleEpoch):  # Redis went back to an earlier state
                self._note_newer(error)
                await self._place(current)
                return
            if error is not None:
                raise error

    def _note_newer(self, error: MoesaicError) -> None:
        if isinstance(error, StaleEpoch):
            self._epochs.floor = max(self._epochs.floor, error.current)

    def _experts(self) -> list[WorkerRecord]:
        return [record for record in self._fleet.workers.values() if record.role == "expert"]

    def _log_moves(self) -> None:
        now = dict(self._fleet.workers)
        for event, here, there in (
            ("worker.joined", now, self._known),
            ("worker.left", self._known, now),
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
        self._known = now


def _incarnations_missing(
    records: Iterable[WorkerRecord], elsewhere: Iterable[WorkerRecord]
) -> list[WorkerRecord]:
    there = {incarnation(record) for record in elsewhere}
    return [record for record in records if incarnation(record) not in there]
