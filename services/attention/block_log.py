"""The blocks that gateways can find in the prefix cache: a snapshot, then changes by sequence number."""

from collections.abc import Iterator, Sequence

from moesaic.v1 import attention_pb2 as pb

PART_BLOCKS = 32768  # blocks in one message: half a megabyte


class BlockLog:
    """Names of the blocks that can be found, kept on the main loop: the engine is never asked."""

    def __init__(self, profile: pb.EngineProfile) -> None:
        """Begin without blocks; ``profile`` describes the engine in snapshots."""
        self._profile = profile
        self._found: dict[bytes, None] = {}
        self._sequence = 0

    def describe(self, profile: pb.EngineProfile) -> None:
        """Describe the engine so in snapshots from now on."""
        self._profile = profile

    def change(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> pb.ExecuteResponse:
        """Note a change.

        Returns:
            The message that tells of it.
        """
        self._sequence += 1
        self._found.update(dict.fromkeys(stored))
        for name in evicted:
            self._found.pop(name, None)  # it may have come and gone between two changes
        return pb.ExecuteResponse(
            block_changes=pb.BlockChanges(
                sequence=self._sequence, stored=b"".join(stored), evicted=b"".join(evicted)
            )
        )

    def snapshot(self) -> Iterator[pb.ExecuteResponse]:
        """Yield messages that together name all blocks, as they are now."""
        names = list(self._found)
        for start in range(0, max(1, len(names)), PART_BLOCKS):
            first = start == 0
            yield pb.ExecuteResponse(
                block_snapshot=pb.BlockSnapshot(
                    sequence=self._sequence,
                    first=first,
                    hashes=b"".join(names[start : start + PART_BLOCKS]),
                    engine=self._profile if first else None,
                )
            )
