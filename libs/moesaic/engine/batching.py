"""Which rows run next: continuous batching with chunked prefill, pure (events in, decisions out).

Answers that have begun go first, a row each, so they keep their pace (``step_sharing``); what
remains of the row budget computes prompts, tenants in turn (``fairness``), and within a tenant by
``priority`` and by arrival, long requests and others in turn. Who gets no place or no blocks, since others have more
than their share, makes the last of these give up its own; it computes again later what can no
longer be found.

With a hasher, full blocks are found by their content: a request starts behind the longest beginning
that is there already. One whose next blocks are just being computed by another waits for them
rather than compute them as well.

Scoring that stores no KV runs by itself, in steps between those planned here (``sweeps``).
"""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, blocks_for
from moesaic.engine.light_steps import LightSteps, Party, light_parties
from moesaic.engine.limits import Limits, check_request
from moesaic.engine.pace import Pace
from moesaic.engine.requests import Request, RequestKey
from moesaic.engine.sequences import Answer, Chunk, Score, Work, rank, reusable, work_of
from moesaic.engine.step_sharing import StepSharing
from moesaic.engine.sweeps import ROWS_ALONE, Slice, Sweeps
from moesaic.engine.waiting import WaitingQueue
from moesaic.errors import Overloaded
from moesaic.fairness import Claim, Shares, who_gives_way
from moesaic.prefix.block_hashes import BlockHasher
from moesaic.prefix.flops import ModelFlops


@dataclass
class Plan:
    """One step: its chunks, and the KV blocks to copy, (from, to), before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prompt_rows: int = 0  # rows of those that do not decode
    is_light: bool = False  # of light tenants only, while others have work

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
    displaced: int = 0  # requests that had to leave the queue


class Batcher:
    """Holds all requests of one engine, from submission to their last event."""

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        hasher: BlockHasher | None = None,
        num_layers: int = 1,
        flops: ModelFlops = ROWS_ALONE,
        step_target_s: float = 0.0,
    ) -> None:
        """``hasher`` names blocks of ``BLOCK_SIZE`` tokens; without one nothing is shared. ``flops``
        measures the slices of sweeps. Steps should take ``step_target_s``; 0: as long as they do."""
        self.limits = limits
        rows = limits.max_num_batched_tokens
        self.sweeps = Sweeps(limits.sweep_blocks, num_layers, rows, flops)
        self.pool = BlockPool(num_blocks)
        self.waiting = WaitingQueue()
        self.running: list[Work] = []  # by rank
        self._num_of: Counter[tuple[str, str]] = Counter()  # of these, by request
        self.tally = Tally()
        self.pace, self._light_steps = Pace(step_target_s, rows), LightSteps(step_target_s)
        self._shares = Shares()
        self._hasher = hasher
        self._arrivals, self._steps = itertools.count(), itertools.count(1)

    def submit(self, request: Request) -> list[Work]:
        """Queue a request; returns those that have to leave the queue for it, which are forgotten.

        Raises:
            InvalidInput: it can never run here.
            Overloaded: the queue is full, and nobody there has to give way to it.
        """
        check_request(request, self.limits, self.pool.num_blocks)
        swept = self.limits.sweeps(request.work)
        work = work_of(request, next(self._arrivals), swept=swept)
        displaced = self._make_room(work.claim, len(work.tokens))
        if self._hasher is not None:
            work.root = self._hasher.root(request.cache_salt, exact=request.exact)
            self._hasher.extend(work.hashes, work.root, work.tokens)
        (self.sweeps.waiting if swept else self.waiting).add(work)
        return displaced

    def _make_room(self, newcomer: Claim, num_tokens: int) -> list[Work]:
        """Have as many leave the queue as the newcomer needs and has a right to."""
        limits = self.limits
        displaced: list[Work] = []
        kinds = self.waiting.kinds.keys() | self.sweeps.waiting.kinds.keys()
        num, queued = self.num_waiting, self.waiting.num_tokens + self.sweeps.waiting.num_tokens

        def make(needs: int, free: int, amount: Callable[[Work], int], full: str) -> None:
            if needs <= free:
                return
            if kinds == {(newcomer.tenant, newcomer.priority)}:  # these do not give way to it
                raise Overloaded(full)
            waiting = (*self.waiting, *self.sweeps.waiting)
            staying = [work for work in waiting if work not in displaced]
            leaving = who_gives_way(
                *(newcomer, needs, free, staying, amount),
                may_leave=lambda work: work.num_cached is None,  # what has run is kept
                among_requests=False,
            )
            if leaving is None:
                raise Overloaded(full)
            displaced.extend(leaving)

        full = f"{num} requests are waiting already"
        make(1, limits.max_num_queued_reqs - num, lambda work: 1, full)
        left = queued - sum(len(work.tokens) for work in displaced)
        if left and left + num_tokens > limits.max_num_queued_tokens:
            free = limits.max_num_queued_tokens - left
            full = f"requests with {queued} tokens are waiting already"
            make(min(num_tokens, limits.max_num_queued_tokens), free, _num_tokens, full)
        for work in displaced:
            self.finish(work)
        self.tally.displaced += len(displaced)
        return displaced

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
            self._stop(work)
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
        if self._light_steps.is_due:
            light = light_parties(self.running, self.waiting.tokens, self.pace.rows())
            plan = Plan(is_light=True)
            if light and self._fill(plan, light).chunks:
                return plan
        return self._fill(Plan(), None)

    def _fill(self, plan: Plan, parties: Collection[Party] | None) -> Plan:
        """Plan rows of these parties, or of everyone."""
        budget, step = self.limits.max_num_batched_tokens, next(self._steps)
        running = self._running_of(parties)
        sharing = StepSharing(running, self.pace)
        has_prompts = not all(work.decodes for work in self.running)
        # Kept for the candidate that is next, or it would wait as long as answers come.
        whole = max((work.least_rows for work in running), default=0)
        for work in sharing.answers:
            if budget > whole and work in self.running:  # not preempted meanwhile
                work.last_step = step
                budget -= self._add(plan, work, 1)
        if self.waiting or has_prompts:
            quantum = self.pace.rows()
            self._add_prompts(plan, sharing, budget, quantum, parties)
            self._note_shares(plan, quantum)
        else:
            self._shares.start_anew()
        self.sweeps.others_had(plan.chunks)
        return plan

    def _running_of(self, parties: Collection[Party] | None) -> list[Work]:
        return [w for w in self.running if parties is None or w.claim.party in parties]

    def took(self, plan: Plan, seconds: float) -> None:
        """Take note of how long the step of this plan took."""
        num_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        self.pace.took(plan.prompt_rows, seconds, num_rows - plan.prompt_rows)
        has_prompts = plan.prompt_rows > 0
        self._light_steps.took(seconds, is_light=plan.is_light, has_prompts=has_prompts)

    def _add_prompts(
        self,
        plan: Plan,
        sharing: StepSharing,
        most: int,
        quantum: int,
        parties: Collection[Party] | None,
    ) -> None:
        """Add the rows that are due; if there are any at all, a candidate may run whole, with ``most``."""
        works = [work for work in self._running_of(parties) if not work.decodes]
        if self.waiting and self._may_admit():
            works += self.waiting.of(parties)
        if not works:
            return
        promised = {name for work in self.running for name in work.unpublished}
        tenants = {tenant for tenant, _ in self.waiting.kinds} | {
            w.claim.tenant for w in self.running
        }
        allowed = {tenant: min(most, sharing.prompt_rows(tenant)) for tenant in tenants}
        refusals, num_rows = _Refusals(), 0
        for work in self._shares.in_turn(works, quantum):
            if num_rows >= max(allowed.values()):
                break
            budget = allowed[work.claim.tenant] - num_rows
            if budget <= 0:
                continue
            if work not in self.running:
                if self._alike(work) in refusals.alike or self._awaits(work, promised):
                    continue
                if not self._admit(plan, work, refusals):
                    continue
                promised.update(work.unpublished)
            rows = self._add(plan, work, budget)
            if not rows and isinstance(work, Score) and not num_rows:
                rows = self._add(plan, work, min(most, work.longest_pending))
            num_rows += rows

    def _note_shares(self, plan: Plan, quantum: int) -> None:
        """Remember who has had what, and who would have had more."""
        planned: Counter[int] = Counter()
        for chunk in plan.chunks:
            rows = len(chunk.token_ids)
            planned[id(chunk.owner)] += rows
            if not chunk.owner.decodes:
                plan.prompt_rows += rows
                self._shares.note(chunk.owner.claim, rows)
        waiting = [work.claim for work in self.waiting]
        if plan.prompt_rows or waiting:
            prompts = (work for work in self.running if not work.decodes)
            waiting += [work.claim for work in prompts if work.rows_left > planned[id(work)]]
        given = [(chunk.owner.claim, len(chunk.token_ids)) for chunk in plan.chunks]
        self._shares.served(given, waiting, quantum)

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

    def _may_admit(self) -> bool:
        """Whether any of those that wait could run: there is room, or some have more than others."""
        if len(self.running) < self.limits.max_num_seqs:
            return True
        kinds = {(work.claim.tenant, work.claim.priority) for work in self.running}
        return len(kinds | self.waiting.kinds.keys()) > 1 or len(self._num_of) < len(self.running)

    def _admit(self, plan: Plan, work: Work, refusals: "_Refusals") -> bool:
        """Let ``work`` run, if need be at the cost of those that have more than their share; false
        if it may not, and then it holds no blocks."""
        seats = self.limits.max_num_seqs - len(self.running)
        leaving = who_gives_way(work.claim, 1, seats, self.running, lambda _: 1)
        cached = self.pool.find(reusable(work))
        self.pool.share(cached)
        work.begin(cached)
        if leaving is not None:
            leaving = self._with_blocks(work, leaving, refusals)
        if leaving is None:
            refusals.alike.add(self._alike(work))
            work.release(self.pool)
            return False
        for victim in leaving:
            self._preempt(plan, victim)
        if isinstance(work, Score) and not work.take_blocks(self.pool, self.limits.max_num_seqs):
            raise AssertionError("there is room, and it does not fit")
        if work.num_cached is None:
            work.num_cached = work.computed
            if self._hasher is not None:
                self.tally.prefix_queries_tokens += len(work.tokens)
                self.tally.prefix_hits_tokens += work.computed
        self.waiting.remove(work)
        insort(self.running, work, key=rank)
        self._num_of[work.claim.owner] += 1
        return True

    def _alike(self, work: Work) -> tuple[str, int, int]:
        """The same for all that have the same right to run."""
        tenant, request, priority, _ = work.claim
        return tenant, priority, self._num_of.get((tenant, request), 0)

    def _stop(self, work: Work) -> None:
        self.running.remove(work)
        self._num_of[work.claim.owner] -= 1
        if not self._num_of[work.claim.owner]:
            del self._num_of[work.claim.owner]

    def _with_blocks(
        self, work: Work, leaving: list[Work], refusals: "_Refusals"
    ) -> list[Work] | None:
        """Who else has to leave so that ``work`` gets its blocks as well; None: it may not."""
        needs = work.least_blocks - len(work.blocks)
        free = sum(self._num_held(victim) for victim in leaving) + self.pool.num_free
        staying = [other for other in self.running if other not in leaving]
        tenants: Counter[str] = Counter()
        for other in staying:
            tenants[other.claim.tenant] += self._num_held(other)
        theirs = min((tenants[tenant] for tenant in refusals.lacking_blocks), default=None)
        if theirs is not None and tenants[work.claim.tenant] + needs > theirs:
            free = 0  # they are kept for who was to be served before
        more = who_gives_way(work.claim, needs, free, staying, self._num_held)
        if more is None:
            refusals.lacking_blocks.add(work.claim.tenant)
            return None
        return leaving + more

    def _num_held(self, work: Work) -> int:
        """Blocks that are free once ``work`` gives back its own."""
        return self.pool.num_alone(work.held_blocks)

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
        """Make ``answer`` own ``blocks`` blocks, if need be at the cost of others; false if it cost
        itself."""
        missing = blocks - len(answer.blocks)
        while missing > self.pool.num_free:
            victim = self._last(answer)
            self._preempt(plan, victim)
            if victim is answer:
                return False
        if missing > 0:
            answer.blocks.extend(self.pool.take(missing))
        return True

    def _last(self, growing: Answer) -> Answer:
        """Who gives way to an answer that grows, perhaps itself: of the tenant with the most blocks,
        the last in rank. The first that came stays while another tenant's grows, so that each is the
        first at some time and ends."""
        answers = [work for work in self.running if isinstance(work, Answer)]
        held: Counter[str] = Counter()
        for work in self.running:
            held[work.claim.tenant] += self._num_held(work)
        first = min(answers, key=lambda work: (work.claim.level, work.arrival))
        tenant = growing.claim.tenant
        leaving = [work for work in answers if work is not first or work.claim.tenant == tenant]
        return max(
            leaving, key=lambda work: (work.claim.level, held[work.claim.tenant], *rank(work))
        )

    def _preempt(self, plan: Plan, victim: Work) -> None:
        plan.chunks[:] = [chunk for chunk in plan.chunks if chunk.owner is not victim]
        if isinstance(victim, Score):
            targets = {block for lane in victim.lanes for block in lane}
            plan.copies[:] = [copy for copy in plan.copies if copy[1] not in targets]
        victim.release(self.pool)
        self._stop(victim)
        self.waiting.add(victim)
        self.tally.preemptions += 1


@dataclass
class _Refusals:
    """Who may not run in a step: those that are like them need not be looked at."""

    alike: set[tuple[str, int, int]] = field(default_factory=set)
    lacking_blocks: set[str] = field(default_factory=set)  # tenants


def _num_tokens(work: Work) -> int:
    return len(work.tokens)
