"""The loop that keeps the placement what the fleet and its traffic ask for."""

import asyncio
import time
from contextlib import suppress

import structlog
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.registry import Fleet
from moesaic.errors import InvalidInput, MoesaicError, NotReady, StaleEpoch
from moesaic.messages.decisions import DecisionOutcome, Pin, PlacementDecision
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decision import Decision
from moesaic.placement.fitting import fitting
from moesaic.placement.pins import unfulfilled, with_pins
from services.scheduler.confirming import Confirmation
from services.scheduler.deciding import FleetDecider
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
        self._decider = FleetDecider(fleet)
        self._confirmation = Confirmation(fleet, settings.prepare_timeout_s)
        self._closed = False  # whether all decisions but the next one have an outcome
        self._pins_tried: tuple[int, list[Pin]] = (0, [])  # and the epoch that they were tried for

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
            placed = {worker.worker_id for worker in current.workers}
            if {worker.worker_id for worker in placement.workers} != placed:  # it would not last
                names = ", ".join(sorted(placed))
                raise InvalidInput("placement.workers", f"must be those that are placed: {names}")
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
        self._decider.look()
        if self._fleet.stale:
            self.waiting_for = ["redis"]
            return
        if not self._leadership.held:
            self._closed = False
            self._confirmation.forget()  # whoever leads meanwhile may have workers prepare something
            self.waiting_for = [f"the lead, which {self._leadership.leader or 'nobody'} has"]
            return
        await self._epochs.agree()
        await self._migration.learn()
        await self._policies.refresh()
        if not self._closed:
            await self._replanner.close(self._view.epoch)
            self._closed = True
        decision = self._decider.decide(self._view.current)
        if decision.proposal is not None and (decision.urgent or self._may_change()):
            await self._place_for_workers(decision)
            decision = self._decider.decide(self._view.current)
        self.waiting_for = decision.waiting_for
        told = await self._confirm()
        if told and decision.proposal is None and self._view.current is not None:
            self.waiting_for += unfulfilled(self._view.current, self._policies.current.pins)
            await self._by_traffic(self._view.current)

    def _may_change(self) -> bool:
        """Whether a placement that can wait has waited long enough."""
        if not self._decider.settled(self._settings.settle_s):
            return False
        since_s = time.monotonic() - self._migration.last_commit_s
        return self._view.current is None or since_s >= self._settings.min_epoch_interval_s

    async def _place_for_workers(self, decision: Decision) -> None:
        assert decision.proposal is not None
        proposal, current = decision.proposal, self._view.current
        wanted = with_pins(proposal, self._policies.current.pins)
        if wanted.slots != proposal.slots:  # a wish must not stop what workers need
            wanted = fitting(proposal, wanted, list(self._fleet.workers.values()), current)
        noted = await self._replanner.note_workers(current, wanted, self._decider.known)
        await self._place(wanted, noted, urgent=decision.urgent)

    async def _by_traffic(self, current: Placement) -> None:
        """Move experts if operators have pinned some, or if traffic makes it worth while."""
        await self._replanner.measure(current)
        if not self._may_change():
            return
        pinned = self._pinned(current)
        if pinned.slots != current.slots:
            noted = await self._replanner.note_order(current, pinned, self._fleet.workers)
            self._pins_tried = current.epoch, self._policies.current.pins
            await self._place(pinned, noted, urgent=False)
            await self._confirm()
        elif self._replanner.due():
            self._pins_tried = 0, []
            plan = await self._planned(current)
            if plan is not None and plan.worthwhile:
                noted = await self._replanner.note_plan(plan)
                await self._place(plan.placement, noted, urgent=False)
                await self._confirm()

    def _pinned(self, current: Placement) -> Placement:
        """With the pins that can be had. What cannot, or could not be loaded, is tried again when the
        epoch or the pins have changed, or after the next plan."""
        pins = self._policies.current.pins
        if self._pins_tried == (current.epoch, pins):
            return current
        possible = fitting(
            current, with_pins(current, pins), list(self._fleet.workers.values()), current
        )
        if possible.slots == current.slots:
            self._pins_tried = current.epoch, pins
        return possible

    async def _planned(self, current: Placement) -> Plan | None:
        """A plan, unless the fleet changes meanwhile: that goes first."""
        planning = asyncio.create_task(self._replanner.plan(current, self._experts()))
        news = asyncio.create_task(self._fleet.changed(self._fleet.version))
        try:
            await asyncio.wait({planning, news}, return_when=asyncio.FIRST_COMPLETED)
            if planning.done():
                return await planning
            self._replanner.interrupted()
            return None
        finally:
            news.cancel()
            planning.cancel()
            await asyncio.gather(planning, news, return_exceptions=True)

    async def _place(self, proposal: Placement, noted: PlacementDecision, *, urgent: bool) -> None:
        done = DecisionOutcome(decision_id=noted.decision_id)

        async def begun(epoch: int) -> None:
            nonlocal done
            done = replace(done, tried=epoch)
            self.waiting_for = [f"workers to load placement {epoch}"]
            await self._replanner.note_begun(done)

        started = time.monotonic()
        failure, overtaken = "the scheduler was stopped", False  # unless something else is known
        try:
            placed = await self._migration.carry_out(proposal, urgent=urgent, begun=begun)
            seconds = round(time.monotonic() - started, 3)
            done, failure = replace(done, epoch=placed.epoch, seconds=seconds), ""
            self.waiting_for = []
        except MoesaicError as error:
            failure, overtaken = str(error), isinstance(error, Obsolete)
            self._closed = False  # it may have been committed, if Redis did not say
            self._confirmation.forget()  # a worker may not have heard that it was given up
            self._decider.could_not_load(self._migration.failed)
            raise
        finally:
            done = replace(done, failure=failure)
            await self._replanner.note_outcome(noted, done, overtaken=overtaken)

    async def _confirm(self) -> bool:
        """Put the committed placement in force wherever that has not been acknowledged; returns whether
        it is everywhere."""
        current = self._view.current
        if current is None:
            return False
        if self._epochs.floor <= current.epoch:
            try:
                return await self._confirmation.confirm(current)
            except StaleEpoch as error:
                self._migration.note_newer(error)
        # Somebody has seen a later epoch, or another placement of this one: Redis went back to an
        # earlier state.
        noted = await self._replanner.note_workers(current, current, self._decider.known)
        await self._place(replace(current, epoch=0), noted, urgent=True)
        return False

    def _experts(self) -> list[WorkerRecord]:
        return [record for record in self._fleet.workers.values() if record.role == "expert"]
