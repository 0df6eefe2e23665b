"""Requests that wait for their turn: the most urgent first, equals by arrival."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator

from moesaic.engine.light_steps import Party
from moesaic.engine.sequences import Work, rank


class WaitingQueue:
    """Work that holds no blocks. What was preempted comes back to the place of its arrival."""

    def __init__(self) -> None:
        self._ranked: list[Work] = []
        self.kinds: Counter[tuple[str, int]] = Counter()  # tenants and priorities, how many of each
        self.tokens: Counter[tuple[str, int]] = Counter()  # that they want computed, cached or not
        self.num_tokens = 0  # of all

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Work]:
        """First comes who is next; what happens to the queue meanwhile is not seen."""
        return iter(self._ranked.copy())

    def of(self, parties: Collection[Party] | None) -> list[Work]:
        """Those of some parties, or everyone; first comes who is next."""
        if parties is None:
            return self._ranked.copy()
        if not any((max(0, priority), tenant) in parties for tenant, priority in self.kinds):
            return []
        return [work for work in self._ranked if work.claim.party in parties]

    def add(self, work: Work) -> None:
        """Take ``work`` in."""
        insort(self._ranked, work, key=rank)
        kind = work.claim.tenant, work.claim.priority
        self.kinds[kind] += 1
        self.tokens[kind] += len(work.tokens)
        self.num_tokens += len(work.tokens)

    def remove(self, work: Work) -> None:
        """Let ``work`` go, which is here."""
        idx = bisect_left(self._ranked, rank(work), key=rank)
        assert self._ranked[idx] is work
        del self._ranked[idx]
        self.num_tokens -= len(work.tokens)
        kind = work.claim.tenant, work.claim.priority
        self.kinds[kind] -= 1
        self.tokens[kind] -= len(work.tokens)
        if not self.kinds[kind]:
            del self.kinds[kind], self.tokens[kind]
