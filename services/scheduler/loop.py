"""The loop that decides about the placement while its scheduler leads; ``steps`` has the order of what it does.

Every decision is logged before it is placed, and again with its outcome.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec.structs import replace

from moesaic.errors import (
    CheckpointError,
    InvalidInput,
    MoesaicError,
    NotReady,
    PlacementInfeasible,
    StaleEpoch,
)
from moesaic.messages.decisions import DecisionOutcome, Pin, PlacementDecision, PlacementPolicy
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.pins import unfulfilled
from moesaic.placement.decide.stand_ins import own_part, with_substitution
from moesaic.services.scheduler import causes
from moesaic.services.scheduler.epochs.confirmation import Confirmation
from moesaic.services.scheduler.epochs.placer import Cluster, Obsolete, Placer
from moesaic.services.scheduler.epochs.staged import place_in_stages
from moesaic.services.scheduler.fleet import FleetProposer
from moesaic.services.scheduler.log import DecisionLog
from moesaic.services.scheduler.measuring import measure, measure_sites
from moesaic.services.scheduler.planning.planner import PlacementPlan, Planner
from moesaic.services.scheduler.planning.site_planner import MigrationTerms, SitePlanner
from moesaic.services.scheduler.planning.site_profiles import SiteProfiles
from moesaic.services.scheduler.planning.timing import PlanTimer
from moesaic.services.scheduler.planning.traffic import TrafficFeed
from moesaic.services.scheduler.settings import SchedulerSettings
from moesaic.services.scheduler.steps import ConfirmStep, PlaceStep, PlanStep, Situation, next_step
from moesaic.services.scheduler.substitutions import Substitutions
from moesaic.services.scheduler.versioned import VersionedStore
from moesaic.telemetry import spans

log = structlog.get_logger()

_LOOK_S = 1.0  # how often to look without news: newcomers settle, Redis may have lost its data
_BACKOFF_S = (1.0, 30.0)  # first and longest wait after a failed placement
# Errors that come again however often a substitution is tried.
_REFUSALS = (CheckpointError, InvalidInput, PlacementInfeasible)
_AT_ONCE_S = 0.2  # before deciding again because something has changed


@dataclass(frozen=True)
class PlacementOrders:
    """Orders of operators.

    Attributes:
        policies: how experts are placed.
        substitution: gives the way to degrade choices.
    """

    policies: VersionedStore[PlacementPolicy]
    substitution: Callable[[], Substitution] = Substitution


@dataclass(frozen=True)
class Measured:
    """Measurements that plans are made from.

    Attributes:
        traffic: of expert workers and agents.
        sites: links and memory of the sites of agents.
    """

    traffic: TrafficFeed
    sites: SiteProfiles


class PlacementLoop:
    """Decides about the placement while its scheduler leads.

    Attributes:
        waiting_for: causes that keep a placement from being committed, for people.
    """

    def __init__(
        self,
        cluster: Cluster,
        orders: PlacementOrders,
        measured: Measured,
        decisions: DecisionLog,
        settings: SchedulerSettings,
    ) -> None:
        self.waiting_for: list[str] = []
        self._fleet, self._view = cluster.fleet, cluster.view
        self._leadership, self._epochs = cluster.leadership, cluster.epochs
        self._policies, self._substitutions = orders.policies, Substitutions(orders.substitution)
        self._feed, self._profiles, self._log = measured.traffic, measured.sites, decisions
        self._settings = settings
        self._planner = Planner(measured.traffic)
        terms = MigrationTerms(settings.replan_interval_s, settings.load_share)
        self._site_planner = SitePlanner(measured.traffic, measured.sites, terms)
        self._timer = PlanTimer(settings.replan_interval_s)
        self._placer = Placer(
            cluster,
            prepare_timeout_s=settings.prepare_timeout_s,
            load_share=settings.load_share,
        )
        self._turn = asyncio.Lock()  # the loop and operators change the placement one at a time
        self._num_orders = 0  # of operators, that wait or are carried out
        self._proposer = FleetProposer(self._fleet)
        self._pins_tried: tuple[int, list[Pin]] = (0, [])  # and the epoch that they were tried for
        self._confirmation = Confirmation(self._fleet, settings.prepare_timeout_s)
        self._refused_epoch = 0  # by a worker that was told to confirm it
        self._closed = False  # all decisions but the next one have an outcome
        self._load_bytes_per_s: float | None = None  # of workers, at the last paced placement

    async def run(self) -> None:
        """Decide after every change of the fleet and every ``_LOOK_S``, for ever."""
        backoff_s = _BACKOFF_S[0]
        while True:
            seen, pause_s = self._fleet.version, _LOOK_S
            try:
                async with self._turn:
                    if await self._leads() and await self._step():
                        pause_s = _AT_ONCE_S
                backoff_s = _BACKOFF_S[0]
            except Obsolete as cause:
                log.info("placement.obsolete", cause=str(cause))
                await asyncio.sleep(_AT_ONCE_S)
                continue
            except MoesaicError as error:
                log.warning("placement.failed", cause=str(error), retry_after_s=backoff_s)
                self.waiting_for = [f"another attempt: {error}"]
                # A fleet that changes all the time can wait too.
                await asyncio.sleep(_BACKOFF_S[0])
                pause_s, backoff_s = backoff_s - _BACKOFF_S[0], min(2 * backoff_s, _BACKOFF_S[1])
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._fleet.changed(seen)

    async def plan(self, current: Placement, policy: str) -> PlacementPlan:
        """Plan by a policy with what is known now; see ``Planner.plan``. Nothing changes."""
        pins, records, own = self._policies.current.pins, self._experts(), own_part(current)
        if any(record.role == "edge-agent" for record in records):
            return await self._site_planner.plan(own, records, policy, pins)
        return await self._planner.plan(own, records, policy, pins, self._load_bytes_per_s)

    async def apply(self, placement: Placement, base_epoch: int) -> PlacementDecision | None:
        """Make an operator's placement the one in force.

        Returns:
            The decision as it was logged; None if the placement is in force already.

        Raises:
            StaleEpoch: another was committed since it was made.
            InvalidInput: it breaks a rule that every placement must keep.
            NotReady: this scheduler does not lead, or the fleet changed meanwhile.
            MoesaicError: a worker could not load it.
        """
        self._num_orders += 1
        try:
            async with self._turn:
                return await self._apply(placement, base_epoch)
        finally:
            self._num_orders -= 1

    async def _apply(self, placement: Placement, base_epoch: int) -> PlacementDecision | None:
        self.require_lead()
        current = self._view.current
        if current is None or base_epoch != current.epoch:
            raise StaleEpoch(base_epoch, self._view.epoch)
        placed = {worker.worker_id for worker in current.workers}
        # It would not last.
        if {worker.worker_id for worker in placement.workers} != placed:
            names = ", ".join(sorted(placed))
            raise InvalidInput("placement.workers", f"must be the placed workers: {names}")
        placement, own = own_part(placement), own_part(current)
        if placement.slots == own.slots and placement.workers == own.workers:
            return None
        decision = await self._log.note(**causes.by_operator(own, placement, self._fleet.workers))
        with spans.within("decision", _told(decision)):
            try:
                await self._place(placement, decision, urgent=False)
            except Obsolete as cause:
                raise NotReady(str(cause), code="placement_changing") from cause
            # The loop tells the workers that could not be told.
            with suppress(MoesaicError):
                await self._confirm()
        return decision

    def require_lead(self) -> None:
        """Refuse what only a leader may do.

        Raises:
            NotReady: this scheduler does not lead.
        """
        if self._fleet.stale or not self._leadership.held:
            leader = self._leadership.leader or "nobody"
            raise NotReady(f"this scheduler does not lead; {leader} does")

    async def _leads(self) -> bool:
        """Bring what this scheduler knows up to date; False if it may not decide."""
        self._proposer.look()
        if self._fleet.stale:
            self.waiting_for = ["redis"]
            return False
        if not self._leadership.held:
            self._closed = False
            # Another leader may have workers prepare something.
            self._confirmation.forget()
            self.waiting_for = [f"the lead, which {self._leadership.leader or 'nobody'} has"]
            return False
        await self._epochs.agree()
        await self._placer.learn()
        await self._policies.keep()
        if not self._closed:
            await self._log.close(self._view.epoch)
            self._closed = True
        return True

    async def _step(self) -> bool:
        """Do what comes next; True if there may be more to do at once."""
        now = self._situation()
        self.waiting_for = now.proposal.waiting_for
        if now.settled is not None:
            self.waiting_for += unfulfilled(now.settled, now.pins)
            await measure(self._feed, self._log, now.settled)
            await measure_sites(self._profiles, self._log, now.settled)
        step = next_step(now)
        # Also if none of them can be had: see ``place_pins``.
        if now.changeable is not None:
            self._pins_tried = now.changeable.epoch, now.pins
        match step:
            case PlaceStep():
                await self._decide(step.wanted, step.cause, urgent=step.urgent)
            case ConfirmStep():
                return await self._confirm()
            case PlanStep():
                await self._rebalance(step.current)
            case None:
                return False
        return True

    def _situation(self) -> Situation:
        current, pins = self._view.current, self._policies.current.pins
        return Situation(
            current=current,
            proposal=self._proposer.propose(current),
            workers=dict(self._fleet.workers),
            pins=pins,
            pins_tried=self._pins_tried == (self._view.epoch, pins),
            substitution=self._substitutions.possible(current, self._experts()),
            may_change=self._may_change(),
            unconfirmed=current is not None and bool(self._confirmation.missing(current)),
            went_back=max(self._epochs.floor, self._refused_epoch + 1) > self._view.epoch,
            plan_due=self._timer.due,
        )

    def _may_change(self) -> bool:
        """True if a placement that can wait has waited long enough."""
        if not self._proposer.settled(self._settings.settle_s):
            return False
        since_s = time.monotonic() - self._placer.last_commit_s
        return self._view.current is None or since_s >= self._settings.min_epoch_interval_s

    async def _decide(self, wanted: Placement, cause: dict[str, Any], *, urgent: bool) -> None:
        """Log a decision, have it placed, and put it in force."""
        noted = await self._log.note(**cause)
        with spans.within("decision", _told(noted)):
            await self._place(wanted, noted, urgent=urgent)
            await self._confirm()

    async def _rebalance(self, current: Placement) -> None:
        """Plan by the traffic, and move experts if that is worth while."""
        self._timer.begin()
        self._pins_tried = 0, []
        plan = await self._planned(current)
        if plan is not None and plan.worthwhile:
            await self._decide(plan.placement, causes.by_traffic(plan, adopted=True), urgent=False)

    async def _planned(self, current: Placement) -> PlacementPlan | None:
        """Plan by the policy in force; None if the fleet, the policy or an operator's placement goes first."""
        planning = asyncio.create_task(self._plan_by_policy_in_force(current))
        seen, orders = self._fleet.version, self._orders()
        try:
            while not planning.done():
                await asyncio.wait({planning}, timeout=_AT_ONCE_S)
                changed = self._fleet.version != seen or self._orders() != orders
                if changed or self._num_orders:
                    self._timer.interrupted()
                    return None
            return await planning
        finally:
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)

    def _orders(self) -> tuple[PlacementPolicy, Substitution]:
        return self._policies.current, self._substitutions.asked_for

    async def _plan_by_policy_in_force(self, current: Placement) -> PlacementPlan:
        policy = self._policies.current.policy
        plan = await self.plan(current, policy)
        if not plan.worthwhile and self._timer.is_news(plan, policy):
            await self._log.note(**causes.by_traffic(plan, adopted=False))
        return plan

    async def _place(self, wanted: Placement, noted: PlacementDecision, *, urgent: bool) -> None:
        """Have a decision placed, and log which epoch that takes and what became of it."""
        wanted = with_substitution(
            wanted, self._substitutions.possible(self._view.current, self._experts())
        )
        began_s = time.monotonic()
        # Unless something else comes to be known.
        outcome = DecisionOutcome(
            decision_id=noted.decision_id, failure="the scheduler was stopped"
        )
        overtaken = False

        async def begun(epoch: int) -> None:
            """Log the epoch that is prepared, so that a later leader can see if it was committed."""
            nonlocal outcome
            self.waiting_for = [f"workers to load placement {epoch}"]
            outcome = replace(outcome, tried=epoch)
            await self._log.note_outcome(replace(outcome, failure=""))

        try:
            self._profiles.migrating = not urgent
            placed = await place_in_stages(
                self._placer,
                self._confirmation,
                self._fleet,
                self._view,
                wanted,
                urgent=urgent,
                begun=begun,
            )
            seconds = round(time.monotonic() - began_s, 3)
            outcome = replace(outcome, epoch=placed.epoch, seconds=seconds, failure="")
            self.waiting_for = []
        except MoesaicError as error:
            overtaken = isinstance(error, Obsolete)
            outcome = replace(outcome, failure=str(error))
            self._note_failure(wanted, error)
            raise
        finally:
            self._profiles.migrating = False
            self._learn_from(noted, outcome, overtaken=overtaken)
            await self._log.note_outcome(outcome)

    def _note_failure(self, wanted: Placement, error: MoesaicError) -> None:
        # Workers send an error of a kind of its own class as one without: no memory, for example.
        refused = isinstance(error, _REFUSALS) or type(error) is MoesaicError
        if wanted.num_united and refused:
            # The model's own experts must not want for united ones.
            self._substitutions.refuse(wanted.substitution, str(error))
        self._closed = False  # it may have been committed, if Redis did not say
        # A worker may not have heard that it was given up.
        self._confirmation.forget()
        self._proposer.could_not_load(self._placer.failed)

    def _learn_from(
        self, decision: PlacementDecision, outcome: DecisionOutcome, *, overtaken: bool
    ) -> None:
        """Set when to plan next, and how fast workers load.

        After a plan that could not be carried out the next ones wait longer and longer; not after one
        that the fleet has ``overtaken``.
        """
        if decision.cause == "traffic" and overtaken:
            self._timer.interrupted()
        elif decision.cause == "traffic":
            self._timer.ended(failed=bool(outcome.failure))
        # For these workers may have loaded without rest.
        paced = decision.cause != "workers"
        if paced and outcome.epoch and outcome.seconds and decision.moved_bytes:
            self._load_bytes_per_s = decision.moved_bytes / outcome.seconds

    async def _confirm(self) -> bool:
        """Put the committed placement in force wherever that has not been acknowledged.

        Returns:
            False if the fleet changed meanwhile.
        """
        current = self._view.current
        if current is None:
            return False
        try:
            with spans.within("confirm", {"moesaic.epoch": current.epoch}):
                return await self._confirmation.confirm(current)
        except StaleEpoch as error:
            # A worker has seen a later epoch, or another placement of this one.
            self._placer.note_newer(error)
            self._refused_epoch = current.epoch
            return True

    def _experts(self) -> list[WorkerRecord]:
        return [record for record in self._fleet.workers.values() if record.holds_experts]


def _told(decision: PlacementDecision) -> dict[str, str]:
    return {"moesaic.decision_id": decision.decision_id, "moesaic.cause": decision.cause}
