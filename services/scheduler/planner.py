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
CANDIDATES = ("janus", GREEDY, "redundance")  # of ``auto``
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
        try:
            async with self._start_solver() as first:
                made = await self._propose(first, stay, records, traffic, list(pins))
        except MoesaicError as error:
            log.warning("solver.failed", policy=policy, cause=str(error))
            if policy == GREEDY:
                return replace_plan(stay, reason=str(error))
            try:
                async with self._start_solver() as second:
                    greedy = replace_plan(stay, policy=GREEDY)
                    made = await self._propose(second, greedy, records, traffic, list(pins))
            except MoesaicError as again:
                return replace_plan(stay, reason=f"{error}; {GREEDY}: {again}")
        return self._judged(current, records, made, load_bytes_per_s)

    async def _propose(
        self,
        asked: Solver,
        stay: Plan,
        records: Sequence[WorkerRecord],
        traffic: ModelTraffic,
        pins: list[Pin],
    ) -> Plan:
        """The policy's placement, moved about so that most experts stay, and checked.

        Raises:
            MoesaicError: there is none in time, or it breaks a rule.
        """
        current = stay.placement
        travelling = [Traffic.of(layer) for layer in traffic.statistics.traffic(current.layers)]
        by_id = {record.worker_id: record for record in records}
        if missing := [w.worker_id for w in current.workers if w.worker_id not in by_id]:
            raise InvalidInput("workers", f"{', '.join(missing)} left")
        slots = [by_id[worker.worker_id].slots_per_layer for worker in current.workers]
        solved = await asked.ask(
            Solve(
                policies=list(CANDIDATES) if stay.policy == AUTO else [stay.policy],
                slots=slots,
                held=current.slots,
                traffic=travelling,
                expert_bytes=max(record.expert_bytes for record in records),
            )
        )
        if not isinstance(solved, Solved):
            raise InvalidInput("solver", f"answered {type(solved).__name__}")
        asked_for = replace(current, slots=solved.slots)
        if found := violations(asked_for, records, None):
            raise InvalidInput("solver", "; ".join(found))
        proposal = _that_fits(current, with_pins(asked_for, pins), records)
        replayed = await asked.ask(
            Replay(placements=[current.slots, proposal.slots], traffic=travelling)
        )
        if not isinstance(replayed, Replayed):
            raise InvalidInput("solver", f"answered {type(replayed).__name__}")
        before, after = replayed.means if len(replayed.means) == 2 else (None, None)
        return replace_plan(
            stay,
            placement=proposal,
            policy=solved.policy or stay.policy,
            before=before,
            after=after,
            sampled_batches=replayed.batches,
        )

    def _judged(
        self,
        current: Placement,
        records: Sequence[WorkerRecord],
        made: Plan,
        load_bytes_per_s: float | None,
    ) -> Plan:
        """The same with its costs, and whether it is worth them."""
        needed = moves(current, made.placement)
        expert_bytes = max(record.expert_bytes for record in records)
        most = max(sum(m.worker_id == w.worker_id for m in needed) for w in current.workers)
        made = replace_plan(
            made,
            moves=needed,
            moved_bytes=len(needed) * expert_bytes,
            seconds=most * expert_bytes / load_bytes_per_s if load_bytes_per_s else None,
        )
        if not needed:
            return replace_plan(made, reason="nothing better than what is there was found")
        if made.sampled_batches < MIN_SAMPLED:
            reason = f"only {made.sampled_batches} batches were sampled, {MIN_SAMPLED} are needed"
            return replace_plan(made, reason=reason)
        reason = f"predicted gain {made.gain:.1%}, at least {self._least_gain:.1%} is wanted"
        return replace_plan(made, reason=reason, worthwhile=made.gain >= self._least_gain > 0)


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
