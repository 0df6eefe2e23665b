"""The loop that keeps the placement what the fleet and its traffic ask for."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

import structlog
from msgspec.structs import replace
from prometheus_client import Gauge

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import MoesaicError, NotReady, StaleEpoch
from moesaic.messages.decisions import DecisionOutcome, PlacementDecision
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.coverage import missing_experts
from moesaic.placement.damping import Damping
from moesaic.placement.decision import Decision, Incarnation, decide, incarnation
from moesaic.placement.pins import unfulfilled, with_pins
from services.scheduler import workers
from services.scheduler.epochs import EpochStore
from services.scheduler.migration import Migration, Obsolete
from services.scheduler.planner import Plan
from services.scheduler.policies import PolicyStore
from services.scheduler.replanner import Replanner
from services.scheduler.settings import SchedulerSettings

log = structlog.get_logger()

_LOOK_S = 1.0  # how often to look without news: newcomers settle, Redis may have lost its data
_BACKOFF_S = (1.0, 30.0)  # first and longest wait after a failed placement
_AT_ONCE_S = 0.2  # before deciding again because the fleet has changed

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
        policies: PolicyStore,
        replanner: Replanner,
        settings: SchedulerSettings,
    ) -> None:
        self.waiting_for: list[str] = []
        self._fleet, self._view, self._leadership, self._epochs = fleet, view, leadership, epochs
        self._policies, self._replanner = policies, replanner
        self._settings = settings
        self._migration = Migration(
            fleet,
            view,
            leadership,
            epochs,
            prepare_timeout_s=settings.prepare_timeout_s,
            load_share=settings.load_share,
        )
        self._turn = asyncio.Lock()  # one placement at a time, whoever asks for it
        self._damping = Damping()
        self._newcomers: dict[Incarnation, float] = {}  # not placed; when first seen
        self._confirmed: set[tuple[int, Incarnation]] = set()  # epochs in force on workers
        self._known: dict[str, WorkerRecord] = {}

    async def run(self) -> None:
        """Act on every change of the fleet, for ever."""
        backoff_s = _BACKOFF_S[0]
        while True:
            seen, pause_s = self._fleet.version, _LOOK_S
            try:
                async with self._turn:
                    await self._step()
                backoff_s = _BACKOFF_S[0]
            except Obsolete as cause:
                log.info("placement.obsolete", cause=str(cause))
                await asyncio.sleep(_AT_ONCE_S)
                continue
            except MoesaicError as error:
                log.warning("placement.failed", cause=str(error), retry_after_s=backoff_s)
                self.waiting_for = [f"another attempt: {error}"]
                await asyncio.sleep(_BACKOFF_S[0])  # a fleet that changes all the time can wait too
                pause_s, backoff_s = backoff_s - _BACKOFF_S[0], min(2 * backoff_s, _BACKOFF_S[1])
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._fleet.changed(seen)

    async def apply(self, placement: Placement, base_epoch: int) -> PlacementDecision | None:
        """Make an operator's placement the one; ``None`` if it is in force already.

        Raises:
            StaleEpoch: another was committed since it was made.
            InvalidInput: it breaks a rule that every placement must keep.
            NotReady: this scheduler does not lead, or the fleet changed meanwhile.
            MoesaicError: a worker could not load it.
        """
        async with self._turn:
            self.require_lead()
            current = self._view.current
            if current is None or base_epoch != current.epoch:
                raise StaleEpoch(base_epoch, self._view.epoch)
            if placement.slots == current.slots and placement.workers == current.workers:
                return None
            decision = await self._replanner.note_order(current, placement, self._fleet.workers)
            try:
                await self._place(placement, decision, urgent=False)
            except Obsolete as cause:
                raise NotReady(str(cause), code="placement_changing") from cause
            with suppress(MoesaicError):  # the loop tells whoever could not be told
                await self._confirm()
            return decision

    def require_lead(self) -> None:
        """Raises ``NotReady`` unless this scheduler leads."""
        if self._fleet.stale or not self._leadership.held:
            leader = self._leadership.leader or "nobody"
            raise NotReady(f"this scheduler does not lead; {leader} does")

    async def _step(self) -> None:
        self._log_moves()
        if self._fleet.stale:
            self.waiting_for = ["redis"]
            return
        if not self._leadership.held:
            self.waiting_for = [f"the lead, which {self._leadership.leader or 'nobody'} has"]
            self._confirmed.clear()  # whoever leads meanwhile may have workers prepare something
            return
        await self._epochs.agree()
        await self._migration.learn()
        await self._policies.refresh()
        decision = self._decide()
        if decision.proposal is not None and (decision.urgent or self._may_change()):
            await self._place_for_workers(decision)
            decision = self._decide()
        self.waiting_for = decision.waiting_for
        await self._confirm()
        if decision.proposal is None and self._view.current is not None:
            await self._by_traffic(self._view.current)

    def _decide(self) -> Decision:
        records, current = self._experts(), self._view.current
        live = {incarnation(record) for record in records}
        missing = missing_experts(current, live) if current else {}
        _uncovered.set(len(list(chain(*missing.values()))))
        placed = {(w.worker_id, w.generation) for w in current.workers} if current else set()
        now_s = time.monotonic()
        self._damping.note(records, now_s)
        held_back = {
            record.worker_id: wait_s
            for record in records
            if incarnation(record) not in placed
            and (wait_s := self._damping.held_back_s(record.worker_id, now_s)) > 0
        }
        coming = {key for key in live - placed if key[0] not in held_back}
        self._newcomers = {key: self._newcomers.get(key, now_s) for key in coming}
        decision = decide(current, [r for r in records if r.worker_id not in held_back])
        if held_back and decision.proposal is None and (missing or current is None):
            decision = decide(current, records)  # they are needed, however often they left
        decision.waiting_for.extend(
            f"expert worker {worker_id}: came back often, is placed in {wait_s:.0f} s"
            for worker_id, wait_s in held_back.items()
        )
        return decision

    def _may_change(self) -> bool:
        """Whether a placement that can wait has waited long enough."""
        now_s, latest = time.monotonic(), max(self._newcomers.values(), default=float("-inf"))
        if now_s - latest < self._settings.settle_s:
            return False
        since_s = now_s - self._migration.last_commit_s
        return self._view.current is None or since_s >= self._settings.min_epoch_interval_s

    async def _place_for_workers(self, decision: Decision) -> None:
        assert decision.proposal is not None
        proposal = with_pins(decision.proposal, self._policies.current.pins)
        noted = await self._replanner.note_workers(self._view.current, proposal, self._known)
        await self._place(proposal, noted, urgent=decision.urgent)

    async def _by_traffic(self, current: Placement) -> None:
        """Move experts if operators have pinned some, or if traffic makes it worth while."""
        await self._replanner.measure(current.epoch)
        if not self._may_change():
            return
        pins = self._policies.current.pins
        pinned = with_pins(current, pins)
        if pinned.slots != current.slots:
            noted = await self._replanner.note_order(current, pinned, self._fleet.workers)
            await self._place(pinned, noted, urgent=False)
            await self._confirm()
        elif self._replanner.due():
            plan = await self._planned(current)
            if plan is not None and plan.worthwhile:
                noted = await self._replanner.note_plan(plan)
                await self._place(plan.placement, noted, urgent=False)
                await self._confirm()
        self.waiting_for += unfulfilled(current, pins)

    async def _planned(self, current: Placement) -> Plan | None:
        """A plan, unless the fleet changes meanwhile: that goes first."""
        planning = asyncio.create_task(self._replanner.plan(current, self._experts()))
        news = asyncio.create_task(self._fleet.changed(self._fleet.version))
        try:
            await asyncio.wait({planning, news}, return_when=asyncio.FIRST_COMPLETED)
            return await planning if planning.done() else None
        finally:
            news.cancel()
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)

    async def _place(self, proposal: Placement, noted: PlacementDecision, *, urgent: bool) -> None:
        def begun(epoch: int) -> None:
            self.waiting_for = [f"workers to load placement {epoch}"]

        started, failure, epoch = time.monotonic(), "", 0
        try:
            placed = await self._migration.carry_out(proposal, urgent=urgent, begun=begun)
            epoch, self.waiting_for = placed.epoch, []
        except MoesaicError as error:
            failure = str(error)
            self._confirmed.clear()  # a worker may not have heard that it was given up
            raise
        finally:
            outcome = DecisionOutcome(
                decision_id=noted.decision_id,
                epoch=epoch,
                seconds=round(time.monotonic() - started, 3) if epoch else None,
                failure=failure,
            )
            await self._replanner.note_outcome(noted, outcome)

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
            *(
                workers.confirm(worker, current, self._settings.prepare_timeout_s)
                for worker in pending
            ),
            return_exceptions=True,
        )
        for worker, result in zip(pending, results, strict=True):
            if result is None:
                self._confirmed.add((current.epoch, (worker.worker_id, worker.generation)))
        for error in results:
            if isinstance(error, StaleEpoch):
                self._migration.note_newer(error)
        if self._epochs.floor > current.epoch:  # Redis went back to an earlier state
            noted = await self._replanner.note_workers(current, current, self._known)
            await self._place(replace(current, epoch=0), noted, urgent=True)
            return
        for error in results:
            if error is not None:
                raise error

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
