"""Which rows run next: continuous batching with chunked prefill, pure (events in, decisions out).

Running work goes first, so decodes keep their pace; what remains of the row budget admits and
prefills waiting requests. Within both, less ``priority`` goes first and equals go by arrival. A
generation that needs a block when none is free makes the last of the generations give up its blocks
and compute again later what can no longer be found.

With a hasher, full blocks are found by their content: a request starts behind the longest beginning
that is there already. One whose next blocks are just being computed by another waits for them
rather than compute them as well.

Scoring that stores no KV runs by itself, in steps between those planned here (``sweeps``).
"""

import itertools
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, blocks_for
from moesaic.engine.limits import Limits, check_request
from moesaic.engine.requests import Request, RequestKey
from moesaic.engine.sequences import Answer, Chunk, Score, Work, rank, reusable, work_of
from moesaic.engine.sweeps import ROWS_ALONE, Slice, Sweeps
from moesaic.engine.waiting import WaitingQueue
from moesaic.errors import Overloaded
from moesaic.prefix.block_hashes import BlockHasher
from moesaic.prefix.flops import ModelFlops


@dataclass(frozen=True)
class Plan:
    """One step: its chunks, and the KV blocks to copy, (from, to), before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def owners(self) -> list[Work]:
        """Whose work fails with it."""
        return [chunk.owner for chunk in self.chunks]


@dataclass
class Tally:
    """What happened since it was last looked at."""

    preemptions: int = 0
    prefix_queries_tokens: int = 0  # tokens of requests when they first ran
    prefix_hits_tokens: int = 0  # those of them whose KV was there


class Batcher:
    """Holds all requests of one engine, from submission to their last event."""

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        hasher: BlockHasher | None = None,
        num_layers: int = 1,
        flops: ModelFlops = ROWS_ALONE,
    ) -> None:
        """``hasher`` names blocks of ``BLOCK_SIZE`` tokens; without one nothing is shared. ``flops``
        measures the slices of sweeps."""
        self.limits = limits
        rows = limits.max_num_batched_tokens
        self.sweeps = Sweeps(limits.sweep_blocks, num_layers, rows, flops)
        self.pool = BlockPool(num_blocks)
        self.waiting = WaitingQueue()
        self.running: list[Work] = []  # by rank
        self.tally = Tally()
        self._hasher = hasher
        self._arrivals = itertools.count()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidInput: it can never run here.
            Overloaded: the queue is full.
        """
        limits = self.limits
        check_request(request, limits, self.pool.num_blocks)
        if self.num_waiting >= limits.max_num_queued_reqs:
            raise Overloaded(f"{self.num_waiting} requests are waiting already")
        queued = self.waiting.num_tokens + self.sweeps.waiting.num_tokens
        if queued and queued + len(request.token_ids) > limits.max_num_queued_tokens:
            raise Overloaded(f"requests with {queued} tokens are waiting already")
        swept = limits.sweeps(request.work)
        work = work_of(request, next(self._arrivals), swept=swept)
        if self._hasher is not None:
            work.root = self._hasher.root(request.cache_salt, exact=request.exact)
            self._hasher.extend(work.hashes, work.root, work.tokens)
        (self.sweeps.waiting if swept else self.waiting).add(work)

    def cancel(self, key: RequestKey) -> bool:
        """Forget a request wherever it is; false if it is not here."""
        for work in self.everything():
            if work.request.key == key:
                self.finish(work)
                return True
        return False

    def finish(self, work: Work) -> None:
        """Forget ``work`` and free its blocks."""
        if isinstance(work, Score) and work.swept:
            self.sweeps.drop(work)
            return
        work.release(self.pool)
        if work in self.running:
            self.running.remove(work)
        else:
            self.waiting.remove(work)

    def everything(self) -> list[Work]:
        """All unfinished work."""
        swept = (*self.sweeps.running, *self.sweeps.waiting)
        return [*self.running, *self.waiting, *swept]

    @property
    def num_running(self) -> int:
        """Work that has begun."""
        return len(self.running) + len(self.sweeps.running)

    @property
    def num_waiting(self) -> int:
        """Work that has not begun, or has to begin again."""
        return len(self.waiting) + len(self.sweeps.waiting)

    def expired(self, now_s: float) -> list[Work]:
        """The work whose deadline has passed."""
        return [
            work
            for work in self.everything()
            if work.request.deadline_s is not None and work.request.deadline_s <= now_s
        ]

    def next_step(self) -> Plan | Slice:
        """Decide the next step, of which there may be nothing to run. Blocks are taken; nothing else
        changes until the step is reported done."""
        if (piece := self.sweeps.next_slice()) is not None:
            return piece
        plan = self.plan()
        return plan if plan.chunks else self.sweeps.next_slice() or plan

    def plan(self) -> Plan:
        """Decide the next step of all but sweeps, who get their turn after it."""
        plan, budget = Plan(), self.limits.max_num_batched_tokens
        for work in list(self.running):
            if budget == 0:
                break
            if work in self.running:  # not preempted meanwhile
                budget -= self._add(plan, work, budget)
        promised = {name for work in self.running for name in work.unpublished}
        for work in self.waiting:
            if budget == 0 or len(self.running) == self.limits.max_num_seqs:
                break
            if self._awaits(work, promised):
                continue
            if not self._admit(work):
                break
            promised.update(work.unpublished)
            budget -= self._add(plan, work, budget)
        self.sweeps.others_had(plan.chunks)
        return plan

    def commit(self, chunk: Chunk) -> None:
        """The rows of ``chunk`` have been computed; its owner is still here."""
        work = chunk.owner
        if isinstance(work, Score) and chunk.candidate is not None:
            work.pending.remove(chunk.candidate)
            return
        work.computed += len(chunk.token_ids)
        if self._hasher is None or (isinstance(work, Score) and work.swept):
            return
        full = work.computed // BLOCK_SIZE
        if full > len(work.hashes):  # the answer has grown
            self._hasher.extend(work.hashes, work.root, work.tokens)
        for idx in range(work.num_published, full):
            self.pool.publish(work.blocks[idx], work.hashes[idx])
        work.num_published = full

    def _awaits(self, work: Work, promised: Collection[bytes]) -> bool:
        """Whether running work is about to publish what ``work`` would have to compute next."""
        if work.awaited in promised:
            return True
        names = reusable(work)
        missing = names[len(self.pool.find(names)) :]
        shared = list(itertools.takewhile(promised.__contains__, missing))
        work.awaited = shared[-1] if shared else None
        return bool(shared)

    def _admit(self, work: Work) -> bool:
        """Let ``work`` run; false if there are not enough blocks, and then it holds none."""
        cached = self.pool.find(reusable(work))
        self.pool.share(cached)
        work.begin(cached)
        if isinstance(work, Score):
            fits = work.take_blocks(self.pool, self.limits.max_num_seqs)
        else:
            fits = blocks_for(len(work.tokens) + 1) - len(cached) <= self.pool.num_free
        if not fits:
            work.release(self.pool)
            return False
        if work.num_cached is None:
            work.num_cached = work.computed
            if self._hasher is not None:
                self.tally.prefix_queries_tokens += len(work.tokens)
                self.tally.prefix_hits_tokens += work.computed
        self.waiting.remove(work)
        insort(self.running, work, key=rank)
        return True

    def _add(self, plan: Plan, work: Work, budget: int) -> int:
        """Put the next rows of ``work`` into the plan; returns how many."""
        if isinstance(work, Score):
            chunks = work.chunks(budget)
            plan.copies.extend(work.copies(chunks))
        else:
            reach = min(len(work.tokens), work.computed + budget)
            if not self._grow(plan, work, blocks_for(reach)):
                return 0
            chunks = [work.chunk(budget)]
        plan.chunks.extend(chunks)
        return sum(len(chunk.token_ids) for chunk in chunks)

    def _grow(self, plan: Plan, answer: Answer, blocks: int) -> bool:
        """Make ``answer`` own ``blocks`` blocks, if need be at the cost of the last in rank; false
        if it cost itself."""
        missing = blocks - len(answer.blocks)
        while missing > self.pool.num_free:
            victim = next(w for w in reversed(self.running) if isinstance(w, Answer))
            self._preempt(plan, victim)
            if victim is answer:
                return False
        if missing > 0:
            answer.blocks.extend(self.pool.take(missing))
        return True

    def _preempt(self, plan: Plan, victim: Answer) -> None:
        plan.chunks[:] = [chunk for chunk in plan.chunks if chunk.owner is not victim]
        victim.release(self.pool)
        self.running.remove(victim)
        self.waiting.add(victim)
        self.tally.preemptions += 1
