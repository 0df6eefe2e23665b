"""Sequences that run, the KV blocks that they hold, and which of them gives way to one that grows."""

from bisect import insort
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from moesaic.engine.sequences.blocks import BlockPool
from moesaic.engine.sequences.sequence import AnySequence, GenerationSequence, rank
from moesaic.engine.steps.light_steps import Party
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.engine.steps.waiting import WaitingQueue


@dataclass
class BatcherTally:
    """Counts of events since they were last taken."""

    preemptions: int = 0
    prefix_queries_tokens: int = 0  # tokens of requests when they first ran
    prefix_hits_tokens: int = 0  # those of them whose KV was there
    displaced: int = 0  # requests that had to leave the queue

    def take(self) -> "BatcherTally":
        """Return the counts so far, and begin again at zero."""
        taken = BatcherTally(**vars(self))
        vars(self).update(vars(BatcherTally()))
        return taken


class Running:
    """The sequences of one engine that have begun, sweeps aside.

    Attributes:
        sequences: by rank.
        num_of: how many there are of each request, by tenant and request.
        pool: of their blocks.
    """

    def __init__(self, pool: BlockPool, waiting: WaitingQueue, tally: BatcherTally) -> None:
        """Preempted sequences go to ``waiting``."""
        self.sequences: list[AnySequence] = []
        self.pool, self._waiting, self._tally = pool, waiting, tally
        self.num_of: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self.sequences)

    def of(self, parties: Collection[Party] | None) -> list[AnySequence]:
        """List the sequences of some parties, or of everyone."""
        return [s for s in self.sequences if parties is None or s.claim.party in parties]

    def start(self, sequence: AnySequence) -> None:
        """Take in ``sequence``, which waited."""
        self._waiting.remove(sequence)
        insort(self.sequences, sequence, key=rank)
        self.num_of[sequence.claim.owner] += 1

    def stop(self, sequence: AnySequence) -> None:
        """Let ``sequence`` go; its blocks are its caller's concern."""
        self.sequences.remove(sequence)
        owner = sequence.claim.owner
        self.num_of[owner] -= 1
        if not self.num_of[owner]:
            del self.num_of[owner]

    def preempt(self, planned: PlannedStep, victim: AnySequence) -> None:
        """Have ``victim`` give up its place and its blocks, and wait again."""
        planned.drop(victim)
        victim.release(self.pool)
        self.stop(victim)
        self._waiting.add(victim)
        self._tally.preemptions += 1

    @property
    def are_unequal(self) -> bool:
        """False while one tenant's requests of one priority are all that run and wait, with one
        sequence each: none of these gives way to another."""
        kinds = {(s.claim.tenant, s.claim.priority) for s in self.sequences}
        return len(kinds | self._waiting.kinds.keys()) > 1 or len(self.num_of) < len(self)

    def num_held(self, sequence: AnySequence) -> int:
        """Count the blocks that are free once ``sequence`` gives back its own."""
        return self.pool.num_alone(sequence.held_blocks)

    def grow(self, planned: PlannedStep, growing: GenerationSequence, num_blocks: int) -> bool:
        """Make ``growing`` own ``num_blocks`` blocks, if need be at the cost of others.

        Returns:
            False if it had to give up its own.
        """
        missing = num_blocks - len(growing.blocks)
        while missing > self.pool.num_free:
            victim = self._last(growing)
            self.preempt(planned, victim)
            if victim is growing:
                return False
        if missing > 0:
            growing.blocks.extend(self.pool.take(missing))
        return True

    def _last(self, growing: GenerationSequence) -> GenerationSequence:
        """Choose the generation that gives way to ``growing``, perhaps itself.

        It is the last in rank of the tenant with the most blocks. The first that ever came stays
        while another tenant's grows: so each is the first at some time, and ends.
        """
        generations = [s for s in self.sequences if isinstance(s, GenerationSequence)]
        held: Counter[str] = Counter()
        for sequence in self.sequences:
            held[sequence.claim.tenant] += self.num_held(sequence)
        first = min(generations, key=lambda s: (s.claim.level, s.arrival))
        tenant = growing.claim.tenant
        leaving = [s for s in generations if s is not first or s.claim.tenant == tenant]
        return max(leaving, key=lambda s: (s.claim.level, held[s.claim.tenant], *rank(s)))
