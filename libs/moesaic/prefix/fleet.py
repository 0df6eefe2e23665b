"""All workers of a router, found by key, by index and by load; see ``shadows``."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from moesaic.prefix.block_index import BlockIndex
from moesaic.prefix.crowd import Crowd, Room
from moesaic.prefix.flops import ModelFlops
from moesaic.prefix.shadows import (
    NOTHING,
    PACE,
    UNKNOWN,
    Job,
    JobId,
    OthersWork,
    QueueLimits,
    Routed,
    Shadow,
    WorkerKey,
)


class ShadowFleet:
    """All workers, found by key, by index and by load."""

    def __init__(self, flops: ModelFlops, block_size: int, max_blocks: int) -> None:
        """
        Args:
            flops: what the workers' model costs.
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
        self.remaining = 0  # FLOPs, of all workers and routers
        self.capacity = 0  # FLOPs that saturate all accepting workers
        # Bitsets of workers; the last three of accepting ones only.
        self.accepting = self.busy = self.prefilling = self.unsaturated = 0

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
        self._measure()
        return lost

    def accept(self, key: WorkerKey, accepting: bool) -> None:
        """Let a worker have new work, or no more."""
        self.workers[key].accepting = accepting
        self._mark(self.workers[key])
        self._measure()

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
            limits: of its queue.
        """
        worker = self.workers[key]
        worker.limits = limits
        worker.saturation, worker.caches = saturation, caches
        self._take_out(worker)
        worker.pace = round(PACE * max(1.0, slowdown))
        self._put_in(worker)
        self._mark(worker)
        self._measure()

    def others_have(self, key: WorkerKey, others: OthersWork) -> None:
        """Replace the report of the work that other routers have given the worker."""
        worker = self.workers[key]
        self.remaining += others.flops - worker.others.flops
        self._take_out(worker)
        worker.others = others
        self._put_in(worker)
        self._mark(worker)

    def assign(self, job: Job, worker: Shadow, cached_blocks: int, now_s: float) -> Routed:
        """Give a job to a worker that has the first ``cached_blocks`` of its blocks."""
        promised = job.hashes if worker.caches else []
        routed = Routed(job, worker, promised, self.cached_tokens(job, cached_blocks))
        if not worker.jobs:
            worker.busy_since_s = now_s
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
        """Note a job's progress; a report that is behind an earlier one changes nothing."""
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
            if not worker.accepting:  # what waits there takes no room from others
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
        return self._first(candidates, iter(self.by_load))

    def most_filled(self, candidates: int) -> Shadow:
        """Find the most loaded of ``candidates``, at least one; the last of several."""
        return self._first(candidates, reversed(self.by_load))

    def members(self, candidates: int) -> Iterator[Shadow]:
        """Give the workers of a bitset, by index."""
        while candidates:
            idx = (candidates & -candidates).bit_length() - 1
            candidates &= candidates - 1
            yield self._at(idx)

    def _first(self, candidates: int, order: Iterator[tuple[int, int]]) -> Shadow:
        if not candidates & (candidates - 1):
            return self._at(candidates.bit_length() - 1)
        return self._at(next(idx for _, idx in order if candidates >> idx & 1))

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
            self.remaining += remaining - routed.remaining
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
        self.busy = _marked(self.busy, bit, accepting and bool(worker.jobs))
        self.prefilling = _marked(self.prefilling, bit, accepting and worker.num_prefilling > 0)
        self.unsaturated = _marked(self.unsaturated, bit, accepting and not worker.saturated)

    def _measure(self) -> None:
        self.capacity = sum(w.saturation for w in self.workers.values() if w.accepting)


def _marked(bits: int, bit: int, wanted: bool) -> int:
    return bits | bit if wanted else bits & ~bit
