"""Blocks of cached tokens: their names, the index of the workers that have them, and workers' reports.

Equal names mean equal tokens, from a prompt's start on. A caller that finds a block by its name
learns that the same text was computed before. So callers must not be able to construct names: the
hash is cryptographic and keyed, chained over all earlier blocks. Its root separates models, tenants
(by their salt) and quality levels.

In the index, two reasons put a worker's bit into a block's bitset, and either keeps it:

| A block is | because |
|---|---|
| committed | the worker said that it stored the block |
| pending | a request that will compute the block was routed to the worker |

Names are chained, so prompts that share a block share all blocks before it: one length says what two
prompts have in common.
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b, sha256
from itertools import repeat

BLOCK_SIZE = 16  # tokens that one name stands for
HASH_BYTES = 16


def naming_key(block_secret: str, cluster_secret: str = "") -> bytes:
    """Make the key with which equal blocks get equal names everywhere.

    Args:
        block_secret: secret for this key alone; no other secret is needed to name blocks.
        cluster_secret: source of the key otherwise; the key does not give it away.
    """
    return sha256((block_secret or cluster_secret).encode()).digest()


class BlockHasher:
    """Names the blocks of prompts for one model; equal arguments give equal names everywhere."""

    def __init__(self, key: bytes, model_digest: str, block_size: int) -> None:
        """Name by a key.

        Args:
            key: a secret of at most 64 bytes.
            model_digest: separates models.
            block_size: tokens of a block.
        """
        self._key, self._model_digest, self._block_size = key, model_digest, block_size
        self._keyed = blake2b(digest_size=HASH_BYTES, key=key, person=b"moesaic.block")

    @property
    def naming(self) -> bytes:
        """Digest that only hashers with the same names share; it says nothing about the key."""
        told = blake2b(digest_size=HASH_BYTES, key=self._key, person=b"moesaic.naming")
        told.update(f"{self._block_size} {self._model_digest}".encode())
        return told.digest()

    def root(self, salt: str = "") -> bytes:
        """Make the root that the first block's name is chained to.

        Args:
            salt: parts requests that must not find each other's blocks.
        """
        root = blake2b(digest_size=HASH_BYTES, key=self._key, person=b"moesaic.root")
        for part in (self._model_digest, salt):
            encoded = part.encode()
            root.update(len(encoded).to_bytes(8, "little") + encoded)
        return root.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: Sequence[int]) -> None:
        """Append the names of full blocks that ``hashes`` lacks.

        Args:
            hashes: names of the first blocks; more are appended.
            root: the root of the prompt.
            tokens: all its token ids, below 2**32.
        """
        size = self._block_size
        packed = array("I", tokens[len(hashes) * size : len(tokens) // size * size]).tobytes()
        parent = hashes[-1] if hashes else root
        for start in range(0, len(packed), 4 * size):
            block = self._keyed.copy()
            block.update(parent + packed[start : start + 4 * size])
            parent = block.digest()
            hashes.append(parent)


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
            # Blocks stored together share one bitset object.
            if holders is not seen:
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
        # Nobody had any of them.
        if had.count(bit) == len(had):
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


class BlockFeed:
    """Brings a worker's reports into the index; asks for a new snapshot when one is missing.

    A snapshot comes in parts, and each part is used at once: at worst a hit is missed or does not
    come true before the last part.
    """

    def __init__(self, index: BlockIndex, bit: int) -> None:
        self._index, self._bit = index, bit
        self._sequence: int | None = None  # of the last report; None: a snapshot has to come first

    def snapshot(self, sequence: int, hashes: Iterable[bytes], *, first: bool) -> None:
        """Take one part of all blocks after the change ``sequence``."""
        if first:
            self._index.clear(self._bit)
        self._index.commit(self._bit, hashes)
        self._sequence = sequence

    def changes(self, sequence: int, stored: Iterable[bytes], evicted: Iterable[bytes]) -> bool:
        """Take the next changes.

        Returns:
            False if others are missing before them: the worker has to be asked for a snapshot. Until
            it comes, changes are passed over.
        """
        if self._sequence is None or sequence <= self._sequence:
            # The snapshot has it, or will have.
            return True
        if sequence != self._sequence + 1:
            self._index.clear(self._bit)
            self._sequence = None
            return False
        self._sequence = sequence
        self._index.evict(self._bit, evicted)
        self._index.commit(self._bit, stored)
        return True
