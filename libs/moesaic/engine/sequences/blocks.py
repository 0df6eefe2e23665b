"""KV blocks: the pool that hands them out and finds them again by their content."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moesaic.prefix.blocks import BLOCK_SIZE


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """Hands out block ids ``0..num_blocks-1``. Always: free + used = total.

    A block whose tokens are all computed may be published under the hash of its content. From then
    on nobody writes to it, and others may find and share it. When its last holder gives it back it
    is free, and still found until its room is needed. Blocks without content go first, then the one
    that was given back longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, published; oldest first
        self._holders: dict[int, int] = {}  # of used blocks, how many
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._changes: dict[bytes, bool] = {}  # since they were last taken; whether it can be found

    @property
    def num_free(self) -> int:
        """Number of blocks without a holder."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of blocks without a holder that can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks with a holder."""
        return len(self._holders)

    @property
    def published(self) -> dict[int, bytes]:
        """Blocks that can be found, with the hashes of their contents."""
        return dict(self._hash_of)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the changes since the last call.

        Returns:
            Contents that can be found now and could not before, and those that no longer can.
        """
        changes, self._changes = self._changes, {}
        stored = [content for content, found in changes.items() if found]
        return stored, [content for content, found in changes.items() if not found]

    def take(self, count: int) -> list[int]:
        """Hold ``count`` blocks that have no other holder.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocks
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def num_alone(self, blocks: Iterable[int]) -> int:
        """Count those of these held blocks that have one holder: it can free them."""
        return sum(self._holders[block] == 1 for block in blocks)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """List the blocks with these contents, in order, up to the first that is not there."""
        found = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Hold published blocks, beside their other holders, if any."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
                self._holders[block] = 1
            else:
                self._holders[block] += 1

    def publish(self, block: int, content: bytes) -> None:
        """Let a held block be found; without effect if another block has the same content."""
        if content not in self._block_of:
            assert block in self._holders
            assert block not in self._hash_of
            self._block_of[content] = block
            self._hash_of[block] = content
            self._changes[content] = True

    def give_back(self, blocks: Sequence[int]) -> None:
        """Stop holding blocks, the last first: a beginning is worth more than its continuation."""
        for block in reversed(blocks):
            # Fails on one without a holder.
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        content = self._hash_of.pop(block)
        del self._block_of[content]
        self._changes[content] = False
        return block


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
