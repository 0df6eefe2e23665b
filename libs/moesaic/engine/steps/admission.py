"""Admission to one step: which waiting sequences begin, and which running ones leave for them.

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

from moesaic.engine.sequences.sequence import AnySequence, ScoringSequence, reusable
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.engine.steps.running import BatcherTally, Running
from moesaic.fairness import who_gives_way


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
