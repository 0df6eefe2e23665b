"""Plans: the best of the policies' proposals for the recent traffic, and its gain set against its cost."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from dataclasses import replace as replace_plan
from functools import cached_property

import structlog
from msgspec.structs import replace

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.messages.decisions import Pin
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.checking import violations
from moesaic.placement.decide.fitting import fitting
from moesaic.placement.decide.moves import Move, moves
from moesaic.placement.decide.pins import with_pins
from moesaic.placement.policies import AUTO, KEEP
from moesaic.services.scheduler.planning.messages import (
    Replay,
    Replayed,
    SentTraffic,
    Solve,
    Solved,
)
from moesaic.services.scheduler.planning.solver_client import Solver, solver
from moesaic.services.scheduler.planning.traffic import ModelTraffic, TrafficFeed

log = structlog.get_logger()

GREEDY = "eplb"  # asked when a policy fails: it only counts and sorts
CANDIDATES = (GREEDY, "eplb-batches", "janus-batches")  # of ``auto``
BY_ORIGIN = ("dance", "optimal")  # policies that need to know where rows come from
MIN_SAMPLED = 32  # batches, of one layer each, below which nothing is concluded

StartSolver = Callable[[], AbstractAsyncContextManager[Solver]]


@dataclass(frozen=True)
class PlacementPlan:
    """A possible placement, with its predicted gain and cost.

    Attributes:
        gain: share of its work that the busiest worker is predicted to lose, in the workers' own
            costs; 0 if unknown.
        before: most activated experts on one worker, mean of the replayed batches.
        after: the same with ``placement``.
        local_share_before: edge agents: share of their rows' choices whose experts are at the same site.
        local_share_after: the same with ``placement``.
        row_s_before: edge agents: mean seconds that a choice waits for experts elsewhere.
        row_s_after: the same with ``placement``.
    """

    placement: Placement  # of epoch 0
    base_epoch: int
    policy: str
    reason: str
    worthwhile: bool = False
    moves: list[Move] = field(default_factory=list)
    moved_bytes: int = 0
    gain: float = 0.0
    before: float | None = None
    after: float | None = None
    seconds: float | None = None
    batches: float = 0.0
    sampled_batches: int = 0
    local_share_before: float | None = None
    local_share_after: float | None = None
    row_s_before: float | None = None
    row_s_after: float | None = None


LEAST_GAIN = 0.03  # predictions err by so much (docs/measured/placement.md)


class Planner:
    """Makes plans from the traffic that the feed has seen."""

    def __init__(
        self, feed: TrafficFeed, start_solver: StartSolver = solver, least_gain: float = LEAST_GAIN
    ) -> None:
        self._feed, self._least_gain, self._start_solver = feed, least_gain, start_solver

    async def plan(
        self,
        current: Placement,
        records: Sequence[WorkerRecord],
        policy: str,
        pins: Iterable[Pin],
        load_bytes_per_s: float | None,
    ) -> PlacementPlan:
        """Plan by ``policy``. There is always a plan; if the solver fails, the placement stays."""
        stay = PlacementPlan(replace(current, epoch=0), current.epoch, policy, "")
        traffic = self._feed.of(current.model_digest)
        if policy == KEEP:
            return replace_plan(stay, reason="the policy is to keep experts where they are")
        if policy in BY_ORIGIN:
            reason = f"{policy} needs demand by origin, which only edge agents tell"
            return replace_plan(stay, reason=reason)
        if traffic is None:
            return replace_plan(stay, reason="no traffic has been seen yet")
        stay = replace_plan(stay, batches=round(_batches(traffic), 1))
        by_key = {record.incarnation: record for record in records}
        keys = [worker.incarnation for worker in current.workers]
        if gone := [key[0] for key in keys if key not in by_key]:
            return replace_plan(stay, reason=f"{', '.join(gone)} left")
        placed = [by_key[key] for key in keys]
        asked_for = list(CANDIDATES) if policy == AUTO else [policy]
        failures: dict[str, str] = {}
        async with self._start_solver() as asked:
            question = _Question(asked, current, placed, traffic, list(pins))
            made = await question.proposals(asked_for, failures)
            if not made and GREEDY not in asked_for:
                made = await question.proposals([GREEDY], failures)
            for name, cause in failures.items():
                log.warning("policy.failed", policy=name, cause=cause)
            if not made:
                why = "; ".join(f"{name}: {cause}" for name, cause in failures.items())
                return replace_plan(stay, reason=why)
            try:
                best = await question.best(stay, made)
            except MoesaicError as error:
                return replace_plan(stay, reason=str(error))
        return self._judged(current, placed, best, load_bytes_per_s)

    def _judged(
        self,
        current: Placement,
        placed: Sequence[WorkerRecord],
        made: PlacementPlan,
        load_bytes_per_s: float | None,
    ) -> PlacementPlan:
        """Add to a plan its cost, and the decision if its gain is worth that."""
        needed = moves(current, made.placement)
        moved_bytes = len(needed) * max(record.expert_bytes for record in placed)
        made = replace_plan(
            made,
            moves=needed,
            moved_bytes=moved_bytes,
            seconds=moved_bytes / load_bytes_per_s if load_bytes_per_s else None,
        )
        if not needed:
            return replace_plan(made, reason="nothing better than what is there was found")
        if made.sampled_batches < MIN_SAMPLED:
            reason = f"only {made.sampled_batches} batches were sampled, {MIN_SAMPLED} are needed"
            return replace_plan(made, reason=reason)
        reason = f"predicted gain {made.gain:.1%}, at least {self._least_gain:.1%} is wanted"
        worthwhile = made.gain > 0 and made.gain >= self._least_gain
        return replace_plan(made, reason=reason, worthwhile=worthwhile)


@dataclass(frozen=True)
class _Question:
    """Questions to a solver about one placement and its traffic."""

    asked: Solver
    current: Placement
    placed: Sequence[WorkerRecord]  # as ``current.workers``
    traffic: ModelTraffic
    pins: list[Pin]

    async def proposals(
        self, policies: Sequence[str], failures: dict[str, str]
    ) -> dict[str, Placement]:
        """Ask policies for proposals, each pinned and checked.

        Args:
            policies: policies by name.
            failures: takes the reason of each policy that makes no proposal.
        """
        made = {}
        for policy in policies:
            try:
                made[policy] = await self._proposal(policy)
            except MoesaicError as error:
                failures[policy] = str(error)
        return made

    async def best(self, stay: PlacementPlan, made: dict[str, Placement]) -> PlacementPlan:
        """Choose the proposal with the best replay, then the one with fewest moves.

        Raises:
            MoesaicError: the solver cannot replay them.
        """
        placements = [self.current.slots, *(proposal.slots for proposal in made.values())]
        replayed = await self.asked.ask(
            Replay(
                placements=placements,
                traffic=self._travelling,
                scheduling=self.traffic.scheduling,
                ridges=[worker.ridge_rows for worker in self.current.workers],
            )
        )
        if not isinstance(replayed, Replayed):
            raise InvalidInput("solver", f"answered {type(replayed).__name__}")
        known = len(placements) if replayed.batches else 0
        if not len(replayed.loads) == len(replayed.activated) == known:
            raise InvalidInput("solver", f"replayed {len(replayed.loads)} of {known} placements")
        loads, activated = replayed.loads or [0.0] * len(placements), replayed.activated
        after, _, policy, at = min(
            (loads[at], len(moves(self.current, proposal)), name, at)
            for at, (name, proposal) in enumerate(made.items(), start=1)
        )
        return replace_plan(
            stay,
            placement=replace(made[policy], epoch=0),
            policy=policy,
            gain=1 - after / loads[0] if loads[0] > 0 else 0.0,
            before=activated[0] if activated else None,
            after=activated[at] if activated else None,
            sampled_batches=replayed.batches,
        )

    async def _proposal(self, policy: str) -> Placement:
        current = self.current
        solved = await self.asked.ask(
            Solve(
                policy=policy,
                slots=[record.slots_per_layer for record in self.placed],
                held=current.slots,
                traffic=self._travelling,
                expert_bytes=max(record.expert_bytes for record in self.placed),
            )
        )
        if not isinstance(solved, Solved):
            raise InvalidInput("solver", f"answered {type(solved).__name__}")
        wanted = replace(current, slots=solved.slots)
        if found := violations(wanted, self.placed, None):
            # More may be wrong with this process.
            await self.asked.end()
            raise InvalidInput("solver", "; ".join(found))
        pinned = with_pins(wanted, self.pins)
        possible = fitting(current, pinned, self.placed, current)
        if possible.slots == current.slots and pinned.slots != current.slots:
            raise InvalidInput("placement", "; ".join(violations(pinned, self.placed, current)))
        return possible

    @cached_property
    def _travelling(self) -> list[SentTraffic]:
        layers = self.traffic.statistics.traffic(self.current.layers)
        return [SentTraffic.of(layer) for layer in layers]


def _batches(traffic: ModelTraffic) -> float:
    return sum(layer.batches for layer in traffic.statistics.layers.values())
