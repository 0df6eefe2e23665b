"""The giving side of all pulls: from a share that a worker keeps, or from its slots."""

import asyncio
from collections.abc import Collection
from concurrent.futures import Executor

import torch
from prometheus_client import Counter
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts.pull import frames
from moesaic.experts.pull.ranges import PULL_BYTES
from moesaic.experts.pull.shard import Shard
from moesaic.experts.pull.shard_file import FileShard
from moesaic.transport.frame import Frame

SERVED_BYTES = Counter("moesaic_gather_served_bytes", "Bytes of packed experts sent to peers")


class PullServer:
    """Answers pulls on the event loop that moves weights, while the engine may be computing."""

    def __init__(
        self,
        layers: Collection[int],
        num_bytes: int,
        shard: Shard,
        contents: int,
        executor: Executor | None = None,
    ) -> None:
        """
        Args:
            layers: decoder layers of which there is something.
            num_bytes: the share of each.
            shard: has them.
            contents: the bytes that are meant, see ``frames.contents_digest``.
            executor: reads a file, on one thread.
        """
        self._layers, self._num_bytes = layers, num_bytes
        self._shard, self._contents, self._executor = shard, contents, executor
        is_file = isinstance(shard, FileShard)
        self._buffer = torch.empty(PULL_BYTES if is_file else 0, dtype=torch.uint8)
        self._turn = asyncio.Lock()  # to use the buffer

    async def answer(self, request: Frame) -> Frame:
        """Serve one pull.

        Raises:
            InvalidInput: other bytes are meant than those that are here, or there are none such.
            ExpertUnavailable: there could be, but are not now.
        """
        if frames.contents_of(request) != self._contents:
            raise InvalidInput(
                "frame.digest", "another model, processor or division of experts than here"
            )
        start, length = frames.range_of(request)
        if request.layer not in self._layers:
            raise InvalidInput(
                "frame.layer", f"this worker has no experts of layer {request.layer}"
            )
        if not (
            start >= 0
            and 4 <= length <= PULL_BYTES
            and start % 4 == length % 4 == 0
            and start + length <= self._num_bytes
        ):
            raise InvalidInput("frame.tensors", f"no {length} bytes from {start} here")
        digests = self._shard.digests(request.layer, start, length)
        in_memory = not isinstance(self._shard, FileShard)
        if in_memory:
            part = self._shard.read(request.layer, start, length)
        else:
            part = await self._read(request.layer, start, length)
        SERVED_BYTES.inc(length)
        return frames.pull_reply(request, part, digests, lasting=in_memory)

    async def _read(self, layer: int, start: int, length: int) -> Tensor:
        """Part of the file, in memory that is used again in the loop's next turn.

        By then the reply has been written. One buffer is enough, for one thread reads.
        """
        loop = asyncio.get_running_loop()
        await self._turn.acquire()
        try:
            part = self._buffer[:length]
            await loop.run_in_executor(self._executor, self._shard.read_into, layer, start, part)
            return part
        finally:
            loop.call_soon(self._turn.release)
