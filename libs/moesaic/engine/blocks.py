"""KV blocks: which are free."""

BLOCK_SIZE = 16  # tokens


class OutOfBlocks(Exception):
    """There are fewer free blocks than asked for; nothing was taken."""


class BlockPool:
    """Hands out block ids ``0..num_blocks-1``. Always: free + used = total."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return len(self._used)

    def take(self, count: int) -> list[int]:
        """Own ``count`` blocks.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocks
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks that were taken."""
        for block in blocks:
            self._used.remove(block)  # fails on one that is free already
            self._free.append(block)


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
