"""Which rows run next: continuous batching with chunked prefill, pure (events in, decisions out).

Running work goes first, in the order it was admitted, so decodes keep their pace; what remains of
the row budget admits and prefills waiting requests, first come first served. A generation that
needs a block when none is free makes the youngest generation give up its blocks and compute them
again later.
"""

from collections import deque
from dataclasses import dataclass, field

from moesaic.engine.blocks import BlockPool, blocks_for
from moesaic.engine.requests import Request, RequestKey, Scoring
from moesaic.engine.sequences import Answer, Chunk, Score, Work, work_of
from moesaic.errors import InvalidInput, Overloaded

MAX_CANDIDATE_TOKENS = 256


@dataclass(frozen=True)
class Limits:
    """What one engine may take on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_model_len: int  # tokens of prompt and answer together


@dataclass(frozen=True)
class Plan:
    """One step: its chunks, and the KV blocks to copy, (from, to), before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Batcher:
    """Holds all requests of one engine, from submission to their last event."""

    def __init__(self, limits: Limits, num_blocks: int) -> None:
        self.limits = limits
        self.pool = BlockPool(num_blocks)
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        self.num_preemptions = 0

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidInput: it can never run here.
            Overloaded: the queue is full.
        """
        self._check(request)
        if len(self.waiting) >= self.limits.max_num_queued_reqs:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already")
        self.waiting.append(work_of(request))

    def _check(self, request: Request) -> None:
        if not request.token_ids:
            raise InvalidInput("prompt", "must have at least one token")
        prompt = len(request.token_ids)
        if isinstance(request.work, Scoring):
            if not request.work.candidates or not all(request.work.candidates):
                raise InvalidInput("labels", "every candidate must have at least one token")
            extra = max(len(c) for c in request.work.candidates)
            if extra > min(MAX_CANDIDATE_TOKENS, self.limits.max_num_batched_tokens):
                raise InvalidInput(
                    "labels",
                    f"a candidate may have at most {MAX_CANDIDATE_TOKENS} tokens, got {extra}",
                )
            most_blocks = blocks_for(prompt) + blocks_for(prompt + extra)
        else:
            if request.work.max_tokens < 1:
                raise InvalidInput(
                    "max_tokens", f"must be at least 1, got {request.work.max_tokens}"
                )
            extra = request.work.max_tokens
            most_blocks = blocks_for(prompt + extra)
        if prompt + extra > self.limits.max_model_len or most_blocks > self.pool.num_blocks:
            most = min(self.limits.max_model_len, self.pool.num_blocks * 16)
            raise InvalidInput(
                "prompt",
                f"prompt ({prompt} tokens) and answer ({extra}) together exceed the {most} tokens there is room for",
                code="context_length_exceeded",
            )

    def cancel(self, key: RequestKey) -> bool:
        """Forget a request wherever it is; false if it is not here."""
        for work in [*self.running, *self.waiting]:
            if work.request.key == key:
                self.finish(work)
                return True
        return False

    def finish(self, work: Work) -> None:
        """Forget ``work`` and free its blocks."""
        work.release(self.pool)
        if work in self.running:
            self.running.remove(work)
        else:
            self.waiting.remove(work)

    def everything(self) -> list[Work]:
        """All unfinished work."""
        return [*self.running, *self.waiting]

    def plan(self) -> Plan:
        """Decide the next step. Blocks are taken; nothing else changes until the step is reported
        done."""
        plan, budget = Plan(), self.limits.max_num_batched_tokens
        for work in list(self.running):
            if budget == 0:
                break
            if work in self.running:  # not preempted meanwhile
                budget -= self._add(plan, work, budget)
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            work = self.waiting[0]
            if not self._admit(work):
                break
            self.waiting.popleft()
            self.running.append(work)
            budget -= self._add(plan, work, budget)
        return plan

    def _admit(self, work: Work) -> bool:
        if isinstance(work, Score):
            return work.take_blocks(self.pool, self.limits.max_num_seqs)
        return blocks_for(len(work.tokens) + 1) <= self.pool.num_free

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
        """Make ``answer`` own ``blocks`` blocks, if need be at the cost of the youngest; false if
        it cost itself."""
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
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
