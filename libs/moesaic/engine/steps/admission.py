"""Admission to an engine, to its queue and to a step. Pure.

A request is refused if it can never run within the limits, or if the queue is full and nothing in it
has to give way. A step lets waiting sequences begin, and running ones leave for them.

A waiting sequence begins behind the longest beginning of it whose KV is there already. It stays
where it is in three cases:

- Others like it were refused in this step: they had the same right to run.
- A running sequence is about to publish the blocks that it would compute next: it waits for them.
- There is no place or no block for it, and no running sequence has more than its share.

Blocks that are free, but too few for a sequence that waits for them, are lent to tenants of which
nothing runs. So a short request waits for no large one, and the large one begins no later.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.classification.candidates import MAX_ANSWER_TOKENS
from moesaic.engine.sequences.blocks import blocks_for
from moesaic.engine.sequences.requests import GenerationTask, Request, ScoringTask
from moesaic.engine.sequences.sequence import AnySequence, ScoringSequence, reusable
from moesaic.engine.steps.queues import BatcherTally, PlannedStep, Running, WaitingQueue
from moesaic.engine.steps.sweeps import blocks_to_sweep
from moesaic.errors import InvalidInput, Overloaded
from moesaic.fairness import Claim, who_gives_way
from moesaic.prefix.blocks import BLOCK_SIZE


@dataclass(frozen=True)
class EngineLimits:
    """Bounds on the requests that one engine takes on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_model_len: int  # tokens of prompt and answer together
    sweep_blocks: int = 0  # room for scoring that stores no KV; 0: there is none
    store_scoring_kv: bool = True  # unless a request says otherwise

    def sweeps(self, task: GenerationTask | ScoringTask) -> bool:
        """True if ``task`` stores no KV. A mean needs rows that others may share, so it does not sweep."""
        if isinstance(task, GenerationTask) or task.pooling == "mean":
            return False
        return not (self.store_scoring_kv if task.store_kv is None else task.store_kv)


def check_request(request: Request, limits: EngineLimits, num_blocks: int) -> None:
    """Refuse a request that can never run with ``num_blocks`` KV blocks.

    Raises:
        InvalidInput: with the field to correct.
    """
    if not request.token_ids:
        raise InvalidInput("prompt", "must have at least one token")
    prompt, task = len(request.token_ids), request.task
    swept = limits.sweeps(task)
    if isinstance(task, ScoringTask):
        extra = _longest_candidate(task, limits)
        most_blocks = blocks_for(prompt)
        # Behind the prompt's full blocks, one candidate at a time at worst.
        if extra > 1:
            most_blocks += blocks_for(prompt + extra - 1) - prompt // BLOCK_SIZE
    else:
        extra = task.max_tokens
        # The prompt alone is of interest.
        least = 1 if task.prompt_logprobs is None else 0
        if extra < least:
            raise InvalidInput("max_tokens", f"must be at least {least}, got {extra}")
        most_blocks = blocks_for(prompt + extra)
    most = limits.max_model_len if swept else min(limits.max_model_len, num_blocks * BLOCK_SIZE)
    if prompt + extra > limits.max_model_len or (most_blocks > num_blocks and not swept):
        raise InvalidInput(
            "prompt",
            f"prompt ({prompt} tokens) and answer ({extra}) together exceed the limit of {most} "
            "tokens",
            code="context_length_exceeded",
        )
    if isinstance(task, ScoringTask) and swept:
        needed = blocks_to_sweep(prompt, task)
        if needed > limits.sweep_blocks:
            raise InvalidInput(
                "prompt",
                f"prompt ({prompt} tokens) and candidates need room for {needed * BLOCK_SIZE} tokens "
                f"without stored KV, but there is room for {limits.sweep_blocks * BLOCK_SIZE}: shorten it, "
                "raise the worker's --sweep-bytes or send moesaic.store_kv true",
                code="context_length_exceeded",
            )


def _longest_candidate(scoring: ScoringTask, limits: EngineLimits) -> int:
    if scoring.pooling is not None and not scoring.candidates:
        return 0
    if not scoring.candidates or not all(scoring.candidates):
        raise InvalidInput("labels", "every candidate must have at least one token")
    longest = max(map(len, scoring.candidates))
    if longest > (most := min(MAX_ANSWER_TOKENS, limits.max_num_batched_tokens)):
        raise InvalidInput("labels", f"a candidate may have at most {most} tokens, got {longest}")
    return longest


def displaced_by(
    newcomer: Claim, num_tokens: int, queues: Sequence[WaitingQueue], limits: EngineLimits
) -> list[AnySequence]:
    """Find those that leave the queue, so that a request of ``num_tokens`` finds room.

    Only requests that have never run leave: the work done for the others would be lost.

    Raises:
        Overloaded: the queue is full, and nothing in it has to give way to the newcomer.
    """
    displaced: list[AnySequence] = []
    kinds = {kind for queue in queues for kind in queue.kinds}
    num_queued, queued_tokens = sum(map(len, queues)), sum(queue.num_tokens for queue in queues)

    def make_room(needs: int, free: int, amount: Callable[[AnySequence], int], full: str) -> None:
        if needs <= free:
            return
        # Equals do not give way.
        if kinds == {(newcomer.tenant, newcomer.priority)}:
            raise Overloaded(full)
        waiting = [sequence for queue in queues for sequence in queue]
        leaving = who_gives_way(
            newcomer,
            needs,
            free,
            [sequence for sequence in waiting if sequence not in displaced],
            amount,
            may_leave=lambda sequence: sequence.num_cached is None,
            among_requests=False,
        )
        if leaving is None:
            raise Overloaded(full)
        displaced.extend(leaving)

    full = f"{num_queued} requests are waiting already"
    make_room(1, limits.max_num_queued_reqs - num_queued, lambda _: 1, full)
    most_tokens = limits.max_num_queued_tokens
    left = queued_tokens - sum(len(sequence.tokens) for sequence in displaced)
    if left and left + num_tokens > most_tokens:
        full = f"requests with {queued_tokens} tokens are waiting already"
        make_room(min(num_tokens, most_tokens), most_tokens - left, _num_tokens, full)
    return displaced


def _num_tokens(sequence: AnySequence) -> int:
    return len(sequence.tokens)


class Admission:
    """Lets waiting sequences begin in one step."""

    def __init__(
        self,
        planned: PlannedStep,
        running: Running,
        max_num_seqs: int,
        tally: BatcherTally | None,
        threshold: float = 1.0,
    ) -> None:
        """Plan for a step.

        Args:
            planned: the step.
            running: the sequences that have begun.
            max_num_seqs: of these, at most.
            tally: counts what was found in the prefix cache; None: there is no cache.
            threshold: of prompts. Those that may be degraded publish nothing to wait for.
        """
        self._planned, self._running, self._pool = planned, running, running.pool
        self._max_num_seqs, self._tally = max_num_seqs, tally
        self._threshold = threshold
        self._promised = {name for s in running.sequences for name in self._coming(s)}
        self._refused: set[tuple[str, int, int]] = set()  # see ``_alike``
        # The first sequence of each tenant that was refused for want of blocks.
        self._lacking_blocks: dict[str, AnySequence] = {}

    @property
    def lacks_blocks(self) -> bool:
        """True once a sequence was refused because there are too few KV blocks for it."""
        return bool(self._lacking_blocks)

    def admit(self, sequence: AnySequence) -> bool:
        """Let ``sequence`` run, if need be at the cost of others.

        Returns:
            False if it may not; then it holds no blocks.
        """
        alike = self._alike(sequence)
        if alike in self._refused or self._awaits(sequence):
            return False
        free = self._max_num_seqs - len(self._running)
        leaving = who_gives_way(sequence.claim, 1, free, self._running.sequences, lambda _: 1)
        cached = self._pool.find(reusable(sequence))
        self._pool.share(cached)
        sequence.begin(cached)
        if leaving is not None:
            leaving = self._with_blocks(sequence, leaving)
        if leaving is None:
            self._refused.add(alike)
            sequence.release(self._pool)
            return False
        for victim in leaving:
            self._running.preempt(self._planned, victim)
        self._begin(sequence)
        return True

    def _begin(self, sequence: AnySequence) -> None:
        if isinstance(sequence, ScoringSequence):
            fits = sequence.take_blocks(self._pool, self._max_num_seqs)
            if not fits:
                raise AssertionError("there is room, and it does not fit")
        if sequence.num_cached is None:
            sequence.num_cached = sequence.computed
            if self._tally is not None:
                self._tally.prefix_queries_tokens += len(sequence.tokens)
                self._tally.prefix_hits_tokens += sequence.computed
        self._running.start(sequence)
        self._promised.update(self._coming(sequence))

    def _alike(self, sequence: AnySequence) -> tuple[str, int, int]:
        """Return a key that all sequences with the same right to run have in common."""
        tenant, request, priority, _ = sequence.claim
        return tenant, priority, self._running.num_of.get((tenant, request), 0)

    def _coming(self, sequence: AnySequence) -> list[bytes]:
        """Names of the blocks that ``sequence`` is about to publish."""
        exact = max(self._threshold, sequence.request.min_threshold) >= 1
        return sequence.unpublished if exact else []

    def _awaits(self, sequence: AnySequence) -> bool:
        """True if a running sequence is about to publish what ``sequence`` would compute next."""
        if sequence.awaited in self._promised:
            return True
        names = reusable(sequence)
        missing = names[len(self._pool.find(names)) :]
        shared = list(itertools.takewhile(self._promised.__contains__, missing))
        sequence.awaited = shared[-1] if shared else None
        return bool(shared)

    def _with_blocks(
        self, sequence: AnySequence, leaving: list[AnySequence]
    ) -> list[AnySequence] | None:
        """Add to ``leaving`` those that leave so that ``sequence`` gets its blocks as well.

        Blocks are kept for a tenant that was refused before, unless this one has fewer. A tenant of
        which nothing runs borrows them, until the refused sequence can begin with them.

        Returns:
            All that leave; None: the sequence may not run.
        """
        needs, num_held = sequence.least_blocks - len(sequence.blocks), self._running.num_held
        free = sum(map(num_held, leaving)) + self._pool.num_free
        staying = [other for other in self._running.sequences if other not in leaving]
        tenant, tenants = sequence.claim.tenant, Counter[str]()
        for other in staying:
            tenants[other.claim.tenant] += num_held(other)
        runs_nothing = all(other.claim.tenant != tenant for other in staying)
        lender = min(self._lacking_blocks, key=tenants.__getitem__, default=None)
        sequence.lender = None
        if lender is not None and tenants[tenant] + needs > tenants[lender]:
            if runs_nothing:
                sequence.lender = self._lacking_blocks[lender]
            else:
                free = 0
        more = who_gives_way(sequence.claim, needs, free, staying, num_held)
        if more is None and runs_nothing:
            lent = [other for other in staying if other.lender is sequence]
            free += sum(map(num_held, lent))
            others = [other for other in staying if other not in lent]
            more = who_gives_way(sequence.claim, needs, free, others, num_held)
            leaving = leaving + lent
        if more is None:
            self._lacking_blocks.setdefault(tenant, sequence)
            return None
        return leaving + more
