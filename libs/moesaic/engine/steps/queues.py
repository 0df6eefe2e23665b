"""The sequences of one engine that wait and that run, and the step that is planned of them. Pure."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from moesaic.engine.sequences.blocks import BlockPool
from moesaic.engine.sequences.sequence import (
    AnySequence,
    Chunk,
    GenerationSequence,
    ScoringSequence,
    rank,
)

Party = tuple[int, str]  # see ``Claim.party``
LONG_STEP_ROWS = 256  # such a step may take longer than tokens may be held


@dataclass
class PlannedStep:
    """One step: its chunks, and the KV blocks to copy, (from, to), before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prompt_rows: int = 0  # rows of sequences that do not decode
    prompt_cost: float = 0.0  # of these rows, see ``RowCosts``
    is_light: bool = False  # of light tenants only, while others have work

    @cached_property
    def num_rows(self) -> int:
        """Number of rows, once the step is planned."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sequences(self) -> list[AnySequence]:
        """The sequences that fail if the step does."""
        return [chunk.sequence for chunk in self.chunks]

    def drop(self, sequence: AnySequence) -> None:
        """Take out all that ``sequence`` was to compute. Its lanes are still its own."""
        self.chunks[:] = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        if isinstance(sequence, ScoringSequence):
            targets = {block for lane in sequence.lanes for block in lane}
            self.copies[:] = [copy for copy in self.copies if copy[1] not in targets]


class WaitingQueue:
    """Sequences that hold no blocks: the most urgent first, equals by arrival.

    A preempted one comes back to the place of its arrival.
    """

    def __init__(self) -> None:
        self._ranked: list[AnySequence] = []
        self.kinds: Counter[tuple[str, int]] = Counter()  # by tenant and priority, how many
        self.tokens: Counter[tuple[str, int]] = Counter()  # that these want computed, cached or not
        self.num_tokens = 0  # of all

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[AnySequence]:
        """Iterate over a copy: the next in turn comes first, and later changes are not seen."""
        return iter(self._ranked.copy())

    def of(self, parties: Collection[Party] | None) -> list[AnySequence]:
        """List the sequences of some parties, or of everyone; the next in turn comes first."""
        if parties is None:
            return self._ranked.copy()
        if not any((max(0, priority), tenant) in parties for tenant, priority in self.kinds):
            return []
        return [sequence for sequence in self._ranked if sequence.claim.party in parties]

    def add(self, sequence: AnySequence) -> None:
        """Take ``sequence`` in."""
        insort(self._ranked, sequence, key=rank)
        kind = sequence.claim.tenant, sequence.claim.priority
        self.kinds[kind] += 1
        self.tokens[kind] += len(sequence.tokens)
        self.num_tokens += len(sequence.tokens)

    def remove(self, sequence: AnySequence) -> None:
        """Let ``sequence`` go, which is here."""
        idx = bisect_left(self._ranked, rank(sequence), key=rank)
        assert self._ranked[idx] is sequence
        del self._ranked[idx]
        self.num_tokens -= len(sequence.tokens)
        kind = sequence.claim.tenant, sequence.claim.priority
        self.kinds[kind] -= 1
        self.tokens[kind] -= len(sequence.tokens)
        if not self.kinds[kind]:
            del self.kinds[kind], self.tokens[kind]


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
