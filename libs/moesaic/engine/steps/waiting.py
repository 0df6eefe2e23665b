"""Sequences that wait for their turn: the most urgent first, equals by arrival. Who leaves for a newcomer."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from moesaic.engine.sequences.sequence import AnySequence, rank
from moesaic.engine.steps.light_steps import Party
from moesaic.engine.steps.limits import EngineLimits
from moesaic.errors import Overloaded
from moesaic.fairness import Claim, who_gives_way


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
        if kinds == {(newcomer.tenant, newcomer.priority)}:  # equals do not give way
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
