"""The prefix router: requests wait here until a worker should have them. Pure; callers give the time.

One round goes through the waiting requests, tenants in turn (``moesaic.fairness``) and the urgent and
the early of each first (MoE-Prefill section 7, algorithm 1). Each goes to a worker that is not
saturated (F3), has the longest prefix (F1), and has the least to do; then its work and its blocks
count there (F2). A policy may rather have it wait for a saturated worker. Two rules keep others' work
from holding it back:

| A request | goes to a saturated worker |
|---|---|
| that has waited ``max_wait_s`` | in the next round |
| of a tenant of whom workers have less than of others | at once |
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moesaic.errors import Overloaded
from moesaic.fairness import Claim, Shares, who_gives_way
from moesaic.prefix.fleet import Job, JobId, Room, Shadow, ShadowFleet, WorkerKey
from moesaic.prefix.flops import ModelFlops
from moesaic.prefix.policies import make_policy
from moesaic.prefix.policy import Behind

LONG_TOKENS = 2048  # a request that was given so many is a long one


@dataclass(frozen=True)
class RouterLimits:
    """Bounds of a router."""

    block_size: int  # tokens
    max_blocks: int  # pairs of worker and cached block that are remembered
    max_queued: int  # requests that wait
    max_wait_s: float  # how long saturation may hold a request back


@dataclass(frozen=True, eq=False)
class RoutingDecision:
    """A job and its worker."""

    job: Job
    worker: WorkerKey
    cached_blocks: int  # of the job, expected there
    spilled: bool  # a saturated worker had more of them


@dataclass(eq=False)
class _Waiting:
    job: Job
    claim: Claim
    overdue_s: float  # from when on saturation holds it back no longer
    behind: int = 0  # bitset of saturated workers to wait for

    @property
    def rank(self) -> tuple[int, int]:
        return self.claim.priority, self.claim.arrival


class PrefixRouter:
    """Routes jobs to the workers of its ``fleet``, which callers keep up to date."""

    def __init__(
        self,
        flops: ModelFlops,
        limits: RouterLimits,
        policy: str = "prefix-flops",
    ) -> None:
        self.fleet = ShadowFleet(flops, limits.block_size, limits.max_blocks)
        self.limits = limits
        self._queue: list[_Waiting] = []  # by rank
        self._arrived: dict[JobId, _Waiting] = {}  # by arrival
        self._arrivals = 0
        self._waiting_of: Counter[str] = Counter()  # jobs not behind everyone's, by tenant
        self._shares = Shares()
        self.set_policy(policy)

    @property
    def num_queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    @property
    def queued(self) -> list[Job]:
        """The jobs that wait, in the order of arrival."""
        return [waiting.job for waiting in self._arrived.values()]

    def set_policy(self, policy: str) -> None:
        """Route by another policy from now on; what was routed stays where it is.

        Raises:
            InvalidInput: there is no such policy.
        """
        self._policy, self.policy_name = make_policy(policy), policy
        for waiting in self._queue:
            waiting.behind = 0

    def submit(self, job: Job, now_s: float) -> list[Job]:
        """Queue a job for ``route``; if workers have room for it, ``takes`` has told before.

        Returns:
            Jobs that have to leave the queue for it; they are forgotten.

        Raises:
            Overloaded: too many wait, and none of them has to give way to the job.
        """
        assert job.job_id not in self._arrived
        part_of = job.part_of or str(self._arrivals)
        claim = Claim(job.tenant, part_of, job.priority, self._arrivals)
        free = self.limits.max_queued - len(self._queue)
        leaving = who_gives_way(claim, 1, free, self._queue, lambda _: 1, among_requests=False)
        if leaving is None:
            raise self.refusal()
        for waiting in leaving:
            self.withdraw(waiting.job.job_id)
        self._arrivals += 1
        self.fleet.crowd.join(job.tenant, job.priority, job.num_tokens)
        waiting = _Waiting(job, claim, now_s + self.limits.max_wait_s)
        insort(self._queue, waiting, key=lambda other: other.rank)
        self._arrived[job.job_id] = waiting
        if not claim.level:
            self._waiting_of[job.tenant] += 1
        return [waiting.job for waiting in leaving]

    def takes(self, tenant: str, priority: int, wanted: Room) -> bool:
        """Tell if so many more may wait; of those that may not it is known now that they would be refused."""
        room = self.fleet.room
        return room is None or self.fleet.crowd.takes(tenant, priority, wanted, room)

    def refusal(self) -> Overloaded:
        """Make the error of a request that may not wait."""
        return Overloaded(f"{self.fleet.crowd.num_requests} requests wait for an attention worker")

    def withdraw(self, job_id: JobId) -> bool:
        """Forget a job, waiting or routed.

        Returns:
            False if it was not here.
        """
        waiting = self._arrived.pop(job_id, None)
        if waiting is None:
            return self.fleet.release(job_id)
        job = waiting.job
        self.fleet.crowd.leave(job.tenant, job.priority, job.num_tokens)
        del self._queue[bisect_left(self._queue, waiting.rank, key=lambda other: other.rank)]
        if not waiting.claim.level:
            self._waiting_of[waiting.claim.tenant] -= 1
            if not self._waiting_of[waiting.claim.tenant]:
                del self._waiting_of[waiting.claim.tenant]
        return True

    def next_overdue_s(self) -> float | None:
        """Tell when the earliest job will have waited as long as it may; None: none waits."""
        first = next(iter(self._arrived.values()), None)
        return None if first is None else first.overdue_s

    def route(self, now_s: float) -> list[RoutingDecision]:
        """Go one round: give workers to the waiting jobs that should have one now."""
        overdue_s = self.next_overdue_s()
        if overdue_s is None or not self.fleet.accepting:
            return []
        held = self._policy.holds and not self.fleet.unsaturated and now_s < overdue_s
        if held and not any(map(self._has_less, self._waiting_of)):
            return []
        decisions, given = [], []
        for waiting in self._ordered():
            decision = self._decide(waiting, now_s)
            if decision is not None:
                self.withdraw(waiting.job.job_id)
                self._assign(decision)
                decisions.append(decision)
                given.append((waiting.claim, waiting.job.num_tokens))
        if given:
            for claim, num_tokens in given:
                self._shares.note(claim, num_tokens)
            self._shares.served(given, (left.claim for left in self._queue), LONG_TOKENS)
        return decisions

    def unroutable(self) -> list[Job]:
        """List the waiting jobs that may go to no present worker."""
        return [job for job in self.queued if not self.allowed(job)]

    def _ordered(self) -> Iterable[_Waiting]:
        if not self._policy.reorders:
            return self._shares.in_turn(self._queue, LONG_TOKENS)
        lengths = {
            waiting.rank: self._policy.length(waiting.job, self.fleet) for waiting in self._queue
        }
        return sorted(
            self._queue,
            key=lambda waiting: (waiting.job.priority, lengths[waiting.rank], waiting.rank),
        )

    def allowed(self, job: Job) -> int:
        """Find the workers that a job may go to, saturated or not: a bitset."""
        allowed = self.fleet.accepting
        for key in job.excluded:
            worker = self.fleet.workers.get(key)
            allowed &= ~worker.bit if worker else -1
        return allowed

    def _decide(self, waiting: _Waiting, now_s: float) -> RoutingDecision | None:
        job, fleet = waiting.job, self.fleet
        claim = waiting.claim
        waited = now_s >= waiting.overdue_s or (not claim.level and self._has_less(claim.tenant))
        room = allowed = self.allowed(job)
        if self._policy.holds and not waited:
            room &= fleet.unsaturated
            if self._is_stuck(waiting, room):
                return None
        if not room:
            return None
        picked = self._policy.pick(job, fleet, room, allowed)
        if isinstance(picked, Behind):
            waiting.behind = picked.workers
            return None
        return RoutingDecision(job, picked.worker.key, picked.cached_blocks, picked.spilled)

    def _has_less(self, tenant: str) -> bool:
        """Tell if workers have fewer jobs of a tenant than an equal part of all their jobs."""
        num_of = self.fleet.num_of
        return num_of[tenant] * len(num_of.keys() | {tenant}) < num_of.total()

    def _is_stuck(self, waiting: _Waiting, room: int) -> bool:
        """Tell if a job need not be looked at again, which takes a walk over its blocks.

        Nothing has changed for it while all workers that it waits for are saturated, and no other is
        free.
        """
        behind, fleet = waiting.behind, self.fleet
        changed = behind & (room | ~fleet.accepting) | room & ~fleet.prefilling
        return behind != 0 and not changed

    def _assign(self, decision: RoutingDecision) -> None:
        worker: Shadow = self.fleet.workers[decision.worker]
        self.fleet.assign(decision.job, worker, decision.cached_blocks)
