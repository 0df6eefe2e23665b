"""Index of the KV blocks at workers: block name to bitset of workers, without asking any worker.

Two reasons put a worker's bit into a block's bitset, and either keeps it:

| A block is | because |
|---|---|
| committed | the worker said that it stored the block |
| pending | a request that will compute the block was routed to the worker |

Names are chained, so prompts that share a block share all blocks before it: one length says what two
prompts have in common.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat


class BlockIndex:
    """Bitsets are Python integers; a worker is one bit of them, ``1 << idx``.

    Workers that have more than their equal part of ``max_blocks`` lose the blocks that they stored
    first. Losing a block here costs a hit, never a wrong answer.
    """

    def __init__(self, max_blocks: int) -> None:
        """Remember at most ``max_blocks`` pairs of worker and committed block."""
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}  # what of a worker is not committed is pending
        self._committed: dict[int, dict[bytes, None]] = {}  # by bit; oldest first

    def __len__(self) -> int:
        """Blocks that can be found at some worker."""
        return len(self._holders)

    def num_committed_at(self, bit: int) -> int:
        """Blocks that a worker has, as far as they are remembered."""
        return len(self._committed[bit])

    def join(self, bit: int) -> None:
        """Add a worker, which has nothing yet."""
        self._committed[bit] = {}
        for other in self._committed:
            self._trim(other)

    def leave(self, bit: int) -> None:
        """Forget a worker, whose requests have all been taken back."""
        self._remove(bit, self._committed.pop(bit))

    def match(self, hashes: Sequence[bytes], candidates: int) -> tuple[int, int]:
        """Find the longest beginning of ``hashes`` that one of ``candidates`` has.

        Returns:
            Its length in blocks, and the bitset of candidates that have it: all, if it is empty.
        """
        depth, mask, seen = 0, candidates, -1
        for holders in map(self._holders.get, hashes):
            if holders is not seen:  # blocks stored together share one bitset object
                if holders is None or not (narrowed := mask & holders):
                    break
                mask, seen = narrowed, holders
            depth += 1
        return depth, mask

    def commit(self, bit: int, hashes: Iterable[bytes]) -> None:
        """Note that the worker has stored these blocks."""
        stored = dict.fromkeys(hashes)
        self._committed[bit].update(stored)
        self._add(bit, stored)
        self._trim(bit)

    def evict(self, bit: int, hashes: Iterable[bytes]) -> None:
        """Note that the worker has these blocks no longer; others than its own are passed over."""
        committed = self._committed[bit]
        self._remove(bit, [name for name in hashes if committed.pop(name, self) is not self])

    def clear(self, bit: int) -> None:
        """Forget all blocks that the worker stored."""
        self.evict(bit, list(self._committed[bit]))

    def promise(self, bit: int, hashes: Sequence[bytes], found: int) -> None:
        """Note that a request with these blocks was routed to the worker.

        ``found`` is the number of first blocks that the worker was found to have.
        """
        self._add(bit, hashes[found:])

    def take_back(
        self, bit: int, hashes: Sequence[bytes], others: Iterable[Sequence[bytes]]
    ) -> None:
        """Note that a request with these blocks has ended, complete or not.

        A block that it did not compute stays pending while one of ``others``, the requests still at
        the worker, has it.
        """
        committed, holders = self._committed[bit], self._holders
        if all(map(committed.__contains__, hashes)):
            return
        shared = max((_num_shared(hashes, other) for other in others), default=0)
        pending = [name for name in hashes[shared:] if name not in committed]
        self._remove(bit, [name for name in pending if holders.get(name, 0) & bit])

    def _trim(self, bit: int) -> None:
        """Hold a worker to its equal part: the blocks that it stored first go."""
        excess = len(self._committed[bit]) - max(1, self._max_blocks // len(self._committed))
        if excess > 0:
            oldest = iter(self._committed[bit])
            self.evict(bit, [next(oldest) for _ in range(excess)])

    def _add(self, bit: int, hashes: Collection[bytes]) -> None:
        holders = self._holders
        had = list(map(holders.setdefault, hashes, repeat(bit)))
        if had.count(bit) == len(had):  # nobody had any of them
            return
        before, after = bit, bit
        for name, now in zip(hashes, had, strict=True):
            if now is not before:
                before, after = now, now | bit
            holders[name] = after

    def _remove(self, bit: int, hashes: Iterable[bytes]) -> None:
        holders = self._holders
        before, after = -1, 0
        for name in hashes:
            now = holders[name]
            if now is not before:
                before, after = now, now & ~bit
            if after:
                holders[name] = after
            else:
                del holders[name]


def _num_shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that two prompts have in common; they are the first ones."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda idx: one[idx] != other[idx])
