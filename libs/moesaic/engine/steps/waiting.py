"""Sequences that wait for their turn: the most urgent first, equals by arrival."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator

from moesaic.engine.sequences.sequence import AnySequence, rank
from moesaic.engine.steps.light_steps import Party


class WaitingQueue:
    """Sequences that hold no blocks. A preempted one comes back to the place of its arrival."""

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
