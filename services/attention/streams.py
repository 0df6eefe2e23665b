"""The streams of gateways: what is told to all of them, and to each about its requests."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog

from moesaic.engine.load import Outstanding
from moesaic.v1 import attention_pb2 as pb

PART_BLOCKS = 32768  # blocks in one message: half a megabyte
Responses = asyncio.Queue[pb.ExecuteResponse | None]  # None ends the stream
log = structlog.get_logger()
MAX_QUEUED_EVENTS = 65536  # a gateway that reads so slowly that this fills up has its stream ended
MAX_TOGETHER_BYTES = 1 << 16  # of the events in one message, the last excepted


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
            # It may have come and gone between two changes.
            self._found.pop(name, None)
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


class GatewayStreams:
    """All streams that are open, by number. Lives on the main loop."""

    def __init__(self, on_left: Callable[[int], None]) -> None:
        """Call ``on_left`` with the number of each stream that has ended."""
        self._on_left = on_left
        self._queues: dict[int, Responses] = {}
        self._numbers = itertools.count(1)
        self._blocks = BlockLog(pb.EngineProfile())
        self._watching: set[int] = set()  # streams that are told of blocks
        self._told_others: dict[int, pb.OthersWork] = {}  # what these know of each other's work

    def open(self) -> tuple[int, Responses]:
        """Begin a stream.

        Returns:
            Its number, and what is sent to it, for ``next_response``.
        """
        stream, queue = next(self._numbers), Responses()
        self._queues[stream] = queue
        return stream, queue

    def send(self, stream: int, response: pb.ExecuteResponse) -> None:
        """Tell one stream, if it is still open; one that nobody reads is ended."""
        queue = self._queues.get(stream)
        if queue is None:
            return
        queue.put_nowait(response)
        if queue.qsize() >= MAX_QUEUED_EVENTS:
            log.error("stream.overflow", stream=stream)
            self.end(stream)
            self.leave(stream)

    def end(self, stream: int) -> None:
        """End a stream once everything before has been read."""
        queue = self._queues.get(stream)
        if queue is not None:
            queue.put_nowait(None)

    def leave(self, stream: int) -> None:
        """Forget a stream that nobody reads any more; calling it again changes nothing."""
        self._queues.pop(stream, None)
        self._watching.discard(stream)
        self._told_others.pop(stream, None)
        self._on_left(stream)

    def nudge(self, streams: Iterable[int]) -> None:
        """Show those who wait for answers that the engine lives, though it may have no news for long."""
        for stream in streams:
            queue = self._queues.get(stream)
            if queue is not None and queue.empty():
                queue.put_nowait(pb.ExecuteResponse())

    def watch_blocks(self, stream: int) -> None:
        """Tell a stream of all blocks of the prefix cache, and of changes from now on."""
        # It was ended meanwhile.
        if stream not in self._queues:
            return
        self._watching.add(stream)
        for part in self._blocks.snapshot():
            self._queues[stream].put_nowait(part)

    def describe(self, profile: pb.EngineProfile) -> None:
        """Tell those that watch blocks everything anew, as more is known of the engine now."""
        self._blocks.describe(profile)
        for stream in list(self._watching):
            self.watch_blocks(stream)

    def change_blocks(self, stored: list[bytes], evicted: list[bytes]) -> None:
        """Tell those that watch blocks of a change."""
        change = self._blocks.change(stored, evicted)
        for stream in list(self._watching):
            self.send(stream, change)

    def tell_of_others(self, outstanding: Mapping[int, Outstanding]) -> None:
        """Tell those that watch blocks how much others have the engine do; ``outstanding`` is by stream."""
        for stream in self._watching:
            others = _work_of_others(stream, outstanding)
            if others != self._told_others.get(stream, pb.OthersWork()):
                self._told_others[stream] = others
                self._queues[stream].put_nowait(pb.ExecuteResponse(others_work=others))


def _work_of_others(stream: int, outstanding: Mapping[int, Outstanding]) -> pb.OthersWork:
    total = Outstanding()
    for other, theirs in outstanding.items():
        if other != stream:
            total = total.plus(theirs)
    return pb.OthersWork(
        num_requests=total.num_requests, num_tokens=total.num_tokens, flops=float(total.flops)
    )


async def next_response(queue: Responses) -> pb.ExecuteResponse | None:
    """Wait for the next message of a stream.

    Returns:
        What came first, and what waits behind it, as far as that is small: sending takes as long
        for one as for many. ``None`` at the end.
    """
    response = await queue.get()
    if response is None:
        return None
    responses, size = [response], response.ByteSize()
    while size < MAX_TOGETHER_BYTES and not queue.empty():
        following = queue.get_nowait()
        # The end, which has to be seen.
        if following is None:
            queue.put_nowait(None)
            break
        responses.append(following)
        size += following.ByteSize()
    return pb.ExecuteResponse(together=responses) if len(responses) > 1 else response
