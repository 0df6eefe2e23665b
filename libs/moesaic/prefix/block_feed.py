"""One worker's reports of its cached blocks: a snapshot, then changes by sequence number."""

from collections.abc import Iterable

from moesaic.prefix.block_index import BlockIndex


class BlockFeed:
    """Brings a worker's reports into the index; asks for a new snapshot when one is missing.

    A snapshot comes in parts, and each part is used at once: at worst a hit is missed or does not
    come true before the last part.
    """

    def __init__(self, index: BlockIndex, bit: int) -> None:
        self._index, self._bit = index, bit
        self._sequence: int | None = None  # of the last report; None: a snapshot has to come first

    def snapshot(self, sequence: int, hashes: Iterable[bytes], *, first: bool) -> None:
        """Take one part of all blocks that there are after the change ``sequence``."""
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
            return True  # the snapshot has it, or will have
        if sequence != self._sequence + 1:
            self._index.clear(self._bit)
            self._sequence = None
            return False
        self._sequence = sequence
        self._index.evict(self._bit, evicted)
        self._index.commit(self._bit, stored)
        return True
