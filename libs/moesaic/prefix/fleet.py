"""All workers as a router sees them: the work that each has, its cached blocks, and the requests that wait. Pure.

Every routed request records what remains of it. Progress, completion, cancellation and the loss of a
worker all take from that record, so after any sequence of events a worker's load is the sum over its
requests. The work that other routers gave a worker is known from the worker's own reports.

Workers let so many requests, and tokens of prompts, wait, and turn away what comes beyond. The
gateway applies the same rules before it does any work for a request (see
``moesaic.engine.steps.admission``). If the queue is full, a request is admitted only if another has
to give way to it.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moesaic.prefix.blocks import BlockIndex
from moesaic.prefix.flops import ModelFlops

Kind = tuple[str, int]  # tenant and priority
WorkerKey = Any  # the caller's name of a worker; it can be hashed
JobId = Any
PACE = 1 << 10  # of a worker that transfers do not slow


class Room(NamedTuple):
    """Bounds of the requests that wait."""

    num_requests: int
    num_tokens: int


class Crowd:
    """The requests that wait: here, on their way to workers, and there until they begin."""

    def __init__(self) -> None:
        self._requests: Counter[Kind] = Counter()
        self._tokens: Counter[Kind] = Counter()
        self.num_requests = self.num_tokens = 0

    def join(self, tenant: str, priority: int, num_tokens: int, count: int = 1) -> None:
        """Add requests that wait, with the sum of their tokens."""
        self._count((tenant, priority), count, num_tokens)

    def leave(self, tenant: str, priority: int, num_tokens: int, count: int = 1) -> None:
        """Take requests out that have begun, or wait no more."""
        kind = tenant, priority
        self._count(kind, -count, -num_tokens)
        if not self._requests[kind]:
            del self._requests[kind], self._tokens[kind]

    def takes(self, tenant: str, priority: int, wanted: Room, room: Room) -> bool:
        """Return true if all these further requests may wait."""
        kind = tenant, priority
        if not _fits(self._requests, kind, wanted.num_requests, room.num_requests):
            return False
        # Where nothing waits, a queue takes a prompt of any length.
        needs = min(wanted.num_tokens, room.num_tokens)
        return not self.num_tokens or _fits(self._tokens, kind, needs, room.num_tokens)

    def _count(self, kind: Kind, num_requests: int, num_tokens: int) -> None:
        self._requests[kind] += num_requests
        self._tokens[kind] += num_tokens
        self.num_requests += num_requests
        self.num_tokens += num_tokens


def _fits(amounts: Counter[Kind], newcomer: Kind, needs: int, room: int) -> bool:
    """Tell if a newcomer finds room, where all leave who have to: ``moesaic.fairness.who_gives_way`` says who."""
    lacking = needs - max(0, room - amounts.total())
    if lacking <= 0:
        return True
    tenant, priority = newcomer
    level = max(0, priority)
    leaving = 0
    held: Counter[str] = Counter()
    for (other, others), amount in amounts.items():
        if others > level or (other == tenant and others > priority):
            leaving += amount
        elif max(0, others) == level:
            held[other] += amount
    keeps = held.pop(tenant, 0) + needs
    leaving += sum(max(0, amount - keeps) for amount in held.values())
    return leaving >= lacking


@dataclass(frozen=True, eq=False)
class Job:
    """One request, as the router sees it."""

    job_id: JobId
    num_tokens: int  # of the prompt
    hashes: Sequence[bytes] = ()  # names of the prompt's full blocks
    answer_tokens: int = 1  # that the answer is expected to have; the first comes with the prompt
    sibling_tokens: int = 0  # of candidates longer than a token, which run behind the prompt
    priority: int = 0  # less goes first
    excluded: frozenset[WorkerKey] = frozenset()  # workers that must not get it
    tenant: str = ""
    part_of: str = ""  # the request that has this and other jobs; empty: this job alone


@dataclass(eq=False)
class Routed:
    """A job at its worker."""

    job: Job
    worker: "Shadow"
    promised: Sequence[bytes]  # its blocks, once it is computed
    computed_tokens: int  # of the prompt, or cached
    answered_tokens: int = 0
    began: bool = False
    prefilling: bool = False
    remaining: int = 0  # FLOPs
    ready: int = 0  # those of them that the worker's next steps could take at once
    remaining_tokens: int = 0


@dataclass(frozen=True)
class OthersWork:
    """Unfinished work that other routers gave a worker, by the worker's report."""

    num_requests: int = 0
    num_tokens: int = 0
    flops: int = 0  # that its next steps could take


NOTHING = OthersWork()


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of a worker's queue, beyond which it refuses requests; 0: they are not known."""

    max_waiting: int = 0
    max_waiting_tokens: int = 0
    max_running: int = 0  # requests that need not wait


UNKNOWN = QueueLimits()


@dataclass(eq=False)
class Shadow:
    """One worker.

    ``remaining`` is the work that it was given here and has to do (the papers' C_g). ``ready`` leaves
    out the tokens of answers behind the next one: they come one a step, and fill no step.
    """

    key: WorkerKey
    idx: int  # among the shadows
    saturation: int  # FLOPs of ready work that fill it
    accepting: bool = False
    caches: bool = True
    pace: int = PACE  # how much longer it takes than one that transfers do not slow
    others: OthersWork = NOTHING
    limits: QueueLimits = UNKNOWN
    remaining: int = 0
    ready: int = 0
    remaining_tokens: int = 0
    num_began: int = 0
    num_prefilling: int = 0  # jobs whose prompts are not computed yet
    jobs: dict[JobId, Routed] = field(default_factory=dict)

    @property
    def bit(self) -> int:
        """The worker, in bitsets of workers."""
        return 1 << self.idx

    @property
    def saturated(self) -> bool:
        """True if the worker has enough to do."""
        return self.ready + self.others.flops >= self.saturation

    @property
    def load(self) -> int:
        """Time to do all work, from all routers: in FLOPs, ``PACE`` times over, of an unslowed worker."""
        return (self.remaining + self.others.flops) * self.pace

    @property
    def room(self) -> Room:
        """Room for requests that wait for it, beside what other routers gave it."""
        limits, others = self.limits, self.others
        waiting = max(0, others.num_requests - limits.max_running)
        return Room(
            max(0, limits.max_waiting - waiting),
            max(0, limits.max_waiting_tokens - (others.num_tokens if waiting else 0)),
        )

    @property
    def num_requests(self) -> int:
        """Requests that the worker has, from all routers."""
        return len(self.jobs) + self.others.num_requests

    @property
    def num_tokens(self) -> int:
        """Tokens that the worker has yet to compute, for all routers."""
        return self.remaining_tokens + self.others.num_tokens


class ShadowFleet:
    """All workers, found by key, by index and by load."""

    def __init__(self, flops: ModelFlops, block_size: int, max_blocks: int) -> None:
        """
        Args:
            flops: FLOPs of the workers' model.
            block_size: tokens a block.
            max_blocks: pairs of worker and cached block to remember at most.
        """
        self.flops, self._block_size = flops, block_size
        self.index = BlockIndex(max_blocks)
        self.crowd = Crowd()  # of jobs that have not begun, here or anywhere
        self.workers: dict[WorkerKey, Shadow] = {}
        self.routed: dict[JobId, Routed] = {}
        self.num_of: Counter[str] = Counter()  # jobs that workers have, by tenant; none is 0
        self.shadows: list[Shadow | None] = []  # by index; None: free for the next worker
        self.by_load: list[tuple[int, int]] = []  # (load, index), least first
        # Bitsets of workers; the last two of accepting ones only.
        self.accepting = self.prefilling = self.unsaturated = 0

    def join(self, key: WorkerKey, saturation: int) -> None:
        """Add a worker, which does not accept work yet."""
        assert key not in self.workers
        idx = self.shadows.index(None) if None in self.shadows else len(self.shadows)
        worker = Shadow(key, idx, saturation)
        self.shadows[idx : idx + 1] = [worker]
        self.workers[key] = worker
        insort(self.by_load, (0, idx))
        self.index.join(worker.bit)

    def leave(self, key: WorkerKey) -> list[JobId]:
        """Forget a worker and its jobs.

        Returns:
            The ids of the jobs.
        """
        worker = self.workers[key]
        lost = list(worker.jobs)
        for job_id in lost:
            self.release(job_id)
        self.others_have(key, NOTHING)
        worker.accepting = False
        self._mark(worker)
        self.index.leave(worker.bit)
        self.by_load.remove((0, worker.idx))
        del self.workers[key]
        self.shadows[worker.idx] = None
        return lost

    def accept(self, key: WorkerKey, accepting: bool) -> None:
        """Let a worker have new work, or no more."""
        self.workers[key].accepting = accepting
        self._mark(self.workers[key])

    def describe(
        self,
        key: WorkerKey,
        *,
        saturation: int,
        caches: bool,
        slowdown: float = 1.0,
        limits: QueueLimits = UNKNOWN,
    ) -> None:
        """Take a worker's description of itself.

        Args:
            key: the worker.
            saturation: FLOPs of ready work that fill it.
            caches: false: it promises no blocks; earlier promises count until their requests end.
            slowdown: its steps take so many times as long, at least 1, for transfers that computing
                does not hide; its work counts so many times.
            limits: limits of its queue.
        """
        worker = self.workers[key]
        worker.limits = limits
        worker.saturation, worker.caches = saturation, caches
        self._take_out(worker)
        worker.pace = round(PACE * max(1.0, slowdown))
        self._put_in(worker)
        self._mark(worker)

    def others_have(self, key: WorkerKey, others: OthersWork) -> None:
        """Replace the report of the work that other routers have given the worker."""
        worker = self.workers[key]
        self._take_out(worker)
        worker.others = others
        self._put_in(worker)
        self._mark(worker)

    def assign(self, job: Job, worker: Shadow, cached_blocks: int) -> Routed:
        """Give a job to a worker that has the first ``cached_blocks`` of its blocks."""
        promised = job.hashes if worker.caches else []
        routed = Routed(job, worker, promised, self.cached_tokens(job, cached_blocks))
        worker.jobs[job.job_id] = self.routed[job.job_id] = routed
        self.num_of[job.tenant] += 1
        self.index.promise(worker.bit, promised, cached_blocks)
        self.crowd.join(job.tenant, job.priority, job.num_tokens)
        self._settle(routed)
        return routed

    def cached_tokens(self, job: Job, cached_blocks: int) -> int:
        """Count the tokens that need not be computed; the last one always must, for its logits."""
        return min(cached_blocks, (job.num_tokens - 1) // self._block_size) * self._block_size

    def prompt_flops(self, job: Job, cached_blocks: int) -> int:
        """Count the FLOPs of a job's prompt at a worker that has its first blocks."""
        return self.flops.span(self.cached_tokens(job, cached_blocks), job.num_tokens)

    def progressed(self, job_id: JobId, computed_tokens: int, answered_tokens: int) -> None:
        """Record a job's progress; an outdated report changes nothing."""
        routed = self.routed.get(job_id)
        if routed is None:
            return
        if not routed.began:
            routed.began = True
            routed.worker.num_began += 1
            self._leave_crowd(routed.job)
        routed.computed_tokens = max(routed.computed_tokens, computed_tokens)
        if answered_tokens:
            routed.computed_tokens = routed.job.num_tokens
            routed.answered_tokens = max(routed.answered_tokens, answered_tokens)
        self._settle(routed)

    def release(self, job_id: JobId) -> bool:
        """Forget a job that has ended, for any reason.

        Returns:
            False if no worker had it.
        """
        routed = self.routed.pop(job_id, None)
        if routed is None:
            return False
        worker, tenant = routed.worker, routed.job.tenant
        del worker.jobs[job_id]
        self.num_of[tenant] -= 1
        if not self.num_of[tenant]:
            del self.num_of[tenant]
        worker.num_began -= routed.began
        if not routed.began:
            self._leave_crowd(routed.job)
        self._set_prefilling(routed, False)
        self._count(routed, 0, 0, 0)
        others = (other.promised for other in worker.jobs.values())
        self.index.take_back(worker.bit, routed.promised, others)
        return True

    @property
    def room(self) -> Room | None:
        """Room for requests that wait for accepting workers; None: it is not known, or there is no such worker."""
        if not self.accepting:
            return None
        rooms = []
        for worker in self.workers.values():
            # What waits there takes no room from others.
            if not worker.accepting:
                rooms.append(Room(len(worker.jobs) - worker.num_began, worker.remaining_tokens))
            elif worker.limits.max_waiting:
                rooms.append(worker.room)
            else:
                return None
        return Room(*map(sum, zip(*rooms, strict=True)))

    def _leave_crowd(self, job: Job) -> None:
        self.crowd.leave(job.tenant, job.priority, job.num_tokens)

    def least_loaded(self, candidates: int) -> Shadow:
        """Find the least loaded of ``candidates``, at least one; the first of several."""
        if not candidates & (candidates - 1):
            return self._at(candidates.bit_length() - 1)
        return self._at(next(idx for _, idx in self.by_load if candidates >> idx & 1))

    def members(self, candidates: int) -> Iterator[Shadow]:
        """Give the workers of a bitset, by index."""
        while candidates:
            idx = (candidates & -candidates).bit_length() - 1
            candidates &= candidates - 1
            yield self._at(idx)

    def _at(self, idx: int) -> Shadow:
        worker = self.shadows[idx]
        assert worker is not None
        return worker

    def _settle(self, routed: Routed) -> None:
        """Count what remains of a job, from its progress."""
        job, flops = routed.job, self.flops
        self._set_prefilling(routed, routed.computed_tokens < job.num_tokens)
        answered = routed.answered_tokens
        later = max(job.answer_tokens - max(answered, 1), 0)
        if routed.prefilling:
            ready = flops.span(routed.computed_tokens, job.num_tokens) + flops.head
            siblings = flops.continuation(job.num_tokens, job.sibling_tokens)
            decode = flops.continuation(job.num_tokens, later)
            tokens = job.num_tokens - routed.computed_tokens + job.sibling_tokens + later
            self._count(routed, ready + siblings + decode, ready + siblings, tokens)
            return
        # An answer that is longer than expected, or whose end is on its way, is one row a step.
        at = job.num_tokens + answered
        left = flops.continuation(at, max(later, 1))
        self._count(routed, left, flops.continuation(at, 1), max(later, 1))

    @staticmethod
    def _set_prefilling(routed: Routed, prefilling: bool) -> None:
        routed.worker.num_prefilling += prefilling - routed.prefilling
        routed.prefilling = prefilling

    def _count(self, routed: Routed, remaining: int, ready: int, tokens: int) -> None:
        worker = routed.worker
        if remaining != routed.remaining:
            self._take_out(worker)
            worker.remaining += remaining - routed.remaining
            self._put_in(worker)
        worker.ready += ready - routed.ready
        worker.remaining_tokens += tokens - routed.remaining_tokens
        routed.remaining, routed.ready, routed.remaining_tokens = remaining, ready, tokens
        self._mark(worker)

    def _take_out(self, worker: Shadow) -> None:
        """Its load is about to change: it leaves the order."""
        del self.by_load[bisect_left(self.by_load, (worker.load, worker.idx))]

    def _put_in(self, worker: Shadow) -> None:
        insort(self.by_load, (worker.load, worker.idx))

    def _mark(self, worker: Shadow) -> None:
        """Bring the bitsets up to date with one worker."""
        bit, accepting = worker.bit, worker.accepting
        self.accepting = _marked(self.accepting, bit, accepting)
        self.prefilling = _marked(self.prefilling, bit, accepting and worker.num_prefilling > 0)
        self.unsaturated = _marked(self.unsaturated, bit, accepting and not worker.saturated)


def _marked(bits: int, bit: int, wanted: bool) -> int:
    return bits | bit if wanted else bits & ~bit
