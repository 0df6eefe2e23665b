"""KV blocks: who holds which. Blocks may be shared between sequences; the last owner frees a
block."""

BLOCK_SIZE = 16  # tokens


class OutOfBlocks(Exception):
    """There are fewer free blocks than asked for; nothing was taken."""


class BlockPool:
    """Hands out block ids ``0..num_blocks-1``. Always: free + used = total."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Own ``count`` blocks.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > len(self._free):
            raise OutOfBlocks
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Become one more owner of blocks that somebody owns."""
        for block in blocks:
            assert self._owners[block] > 0
            self._owners[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Give up one ownership of each block."""
        for block in blocks:
            assert self._owners[block] > 0
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
