"""Which placement would serve the recent traffic better, and is it worth while?"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from dataclasses import replace as replace_plan

import structlog
from msgspec.structs import replace

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.messages.decisions import Pin
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.checking import violations
from moesaic.placement.moves import Move, moves
from moesaic.placement.pins import with_pins
from moesaic.placement.policies import POLICIES
from services.scheduler.solver import Replay, Replayed, Solve, Solved, Traffic
from services.scheduler.solving import Solver, solver
from services.scheduler.traffic import ModelTraffic, TrafficFeed

log = structlog.get_logger()

AUTO, KEEP = "auto", "keep"
GREEDY = "eplb"  # what is asked when a policy fails: it only counts and sorts
CANDIDATES = (GREEDY, "eplb-batches", "janus-batches")  # of ``auto``
MIN_SAMPLED = 32  # batches, of one layer each, below which nothing is concluded

StartSolver = Callable[[], AbstractAsyncContextManager[Solver]]


@dataclass(frozen=True)
class Plan:
    """A placement that could be made, and what it would bring."""

    placement: Placement  # of epoch 0
    base_epoch: int
    policy: str
    reason: str
    worthwhile: bool = False
    moves: list[Move] = field(default_factory=list)
    moved_bytes: int = 0
    before: float | None = (
        None  # most activated experts on one worker, mean of the replayed batches
    )
    after: float | None = None
    seconds: float | None = None
    batches: float = 0.0
    sampled_batches: int = 0

    @property
    def gain(self) -> float:
        """The share of the load on the busiest worker that goes; 0 if that is not known."""
        if not self.before or self.after is None:
            return 0.0
        return (self.before - self.after) / self.before


def require_policy(policy: str) -> str:
    """Refuse a policy that is not known.

    Raises:
        InvalidInput: naming those that are.
    """
    known = [AUTO, KEEP, *POLICIES]
    if policy not in known:
        raise InvalidInput("policy", f"must be one of {', '.join(known)}, got {policy!r}")
    return policy


class Planner:
    """Makes plans from the traffic that the feed has seen."""

    def __init__(
        self, feed: TrafficFeed, least_gain: float, start_solver: StartSolver = solver
    ) -> None:
        self._feed, self._least_gain, self._start_solver = feed, least_gain, start_solver

    async def plan(
        self,
        current: Placement,
        records: Sequence[WorkerRecord],
        policy: str,
        pins: Iterable[Pin],
        load_bytes_per_s: float | None,
    ) -> Plan:
        """What ``policy`` would do now. Whatever a solver does, there is a plan: to stay, at worst."""
        stay = Plan(replace(current, epoch=0), current.epoch, policy, "")
        traffic = self._feed.of(current.model_digest)
        if policy == KEEP:
            return replace_plan(stay, reason="the policy is to keep experts where they are")
        if traffic is None:
            return replace_plan(stay, reason="no traffic has been seen yet")
        stay = replace_plan(stay, batches=round(_batches(traffic), 1))
        asked_for = list(CANDIDATES) if policy == AUTO else [policy]
        failures: dict[str, str] = {}
        async with self._start_solver() as asked:
            question = _Question(asked, current, records, traffic, list(pins))
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
        return self._judged(current, records, best, load_bytes_per_s)

    def _judged(
        self,
        current: Placement,
        records: Sequence[WorkerRecord],
        made: Plan,
        load_bytes_per_s: float | None,
    ) -> Plan:
        """The same with its costs, and whether it is worth them."""
        needed = moves(current, made.placement)
        moved_bytes = len(needed) * max(record.expert_bytes for record in records)
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
        return replace_plan(made, reason=reason, worthwhile=made.gain >= self._least_gain > 0)


@dataclass(frozen=True)
class _Question:
    """What a solver is asked about one placement and its traffic."""

    asked: Solver
    current: Placement
    records: Sequence[WorkerRecord]
    traffic: ModelTraffic
    pins: list[Pin]

    async def proposals(
        self, policies: Sequence[str], failures: dict[str, str]
    ) -> dict[str, Placement]:
        """What each policy makes, pinned and checked; why others make nothing goes to
        ``failures``."""
        made = {}
        for policy in policies:
            try:
                made[policy] = await self._proposal(policy)
            except MoesaicError as error:
                failures[policy] = str(error)
        return made

    async def best(self, stay: Plan, made: dict[str, Placement]) -> Plan:
        """The proposal with the best replay, then with fewest moves.

        Raises:
            MoesaicError: the solver cannot replay them.
        """
        placements = [self.current.slots, *(proposal.slots for proposal in made.values())]
        replayed = await self.asked.ask(Replay(placements=placements, traffic=self._travelling))
        if not isinstance(replayed, Replayed):
            raise InvalidInput("solver", f"answered {type(replayed).__name__}")
        before, *means = replayed.means if replayed.batches else [None] * len(placements)
        if len(means) != len(made):
            raise InvalidInput("solver", f"replayed {len(means)} of {len(made)} placements")
        after, _, policy = min(
            (mean or 0.0, len(moves(self.current, proposal)), name)
            for mean, (name, proposal) in zip(means, made.items(), strict=True)
        )
        return replace_plan(
            stay,
            placement=replace(made[policy], epoch=0),
            policy=policy,
            before=before,
            after=after if before is not None else None,
            sampled_batches=replayed.batches,
        )

    async def _proposal(self, policy: str) -> Placement:
        current, by_id = self.current, {record.worker_id: record for record in self.records}
        if missing := [w.worker_id for w in current.workers if w.worker_id not in by_id]:
            raise InvalidInput("workers", f"{', '.join(missing)} left")
        solved = await self.asked.ask(
            Solve(
                policy=policy,
                slots=[by_id[worker.worker_id].slots_per_layer for worker in current.workers],
                held=current.slots,
                traffic=self._travelling,
                expert_bytes=max(record.expert_bytes for record in self.records),
            )
        )
        if not isinstance(solved, Solved):
            raise InvalidInput("solver", f"answered {type(solved).__name__}")
        wanted = replace(current, slots=solved.slots)
        if found := violations(wanted, self.records, None):
            await self.asked.end()  # who knows what else is wrong with it
            raise InvalidInput("solver", "; ".join(found))
        return _that_fits(current, with_pins(wanted, self.pins), self.records)

    @property
    def _travelling(self) -> list[Traffic]:
        layers = self.traffic.statistics.traffic(self.current.layers)
        return [Traffic.of(layer) for layer in layers]


def _batches(traffic: ModelTraffic) -> float:
    return sum(layer.batches for layer in traffic.statistics.layers.values())


def _that_fits(
    current: Placement, proposal: Placement, records: Sequence[WorkerRecord]
) -> Placement:
    """The proposal, or as many of its layers as memory has room for while old experts stay.

    Raises:
        InvalidInput: no layer fits.
    """
    found = violations(proposal, records, current)
    if not found:
        return proposal
    fitting = current
    for idx, layer in enumerate(proposal.slots):
        slots = [*fitting.slots[:idx], layer, *fitting.slots[idx + 1 :]]
        with_layer = replace(current, slots=slots)
        if not violations(with_layer, records, current):
            fitting = with_layer
    if fitting.slots == current.slots:
        raise InvalidInput("placement", "; ".join(found))
    return fitting
