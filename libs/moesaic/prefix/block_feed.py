"""What one worker says of its cached blocks: a snapshot, then changes by sequence number."""

from collections.abc import Iterable

from moesaic.prefix.block_index import BlockIndex


class BlockFeed:
    """Brings a worker's words into the index; asks to begin anew when some are missing.

    A snapshot comes in parts. Nothing of it is complete before the last part, yet what is known is
    used at once: at worst a hit is missed or does not come true.
    """

    def __init__(self, index: BlockIndex, bit: int) -> None:
        self._index, self._bit = index, bit
        self._sequence: int | None = None  # of what came last; None: a snapshot has to come first

    def snapshot(self, sequence: int, hashes: Iterable[bytes], *, first: bool) -> None:
        """Part of all blocks that there are, after the change ``sequence``."""
        if first:
            self._index.clear(self._bit)
        self._index.commit(self._bit, hashes)
        self._sequence = sequence

    def changes(self, sequence: int, stored: Iterable[bytes], evicted: Iterable[bytes]) -> bool:
        """What changed next; false if something is missing before it: the worker has to be asked
        for a snapshot, until which changes are passed over."""
        if self._sequence is None or sequence <= self._sequence:
            return True  # the snapshot has it, or will have
        if sequence != self._sequence + 1:
            self._index.clear(self._bit)
            self._sequence = None
            return False
        self._sequence = sequence
        self._index.evict(self._bit, evicted)
        self._index.commit(self._bit, stored)
        return True
