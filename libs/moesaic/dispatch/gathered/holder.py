"""The giving side of all pulls of experts: of a share that a worker keeps, or of what is in its slots."""

import asyncio
from collections.abc import Collection
from concurrent.futures import Executor

import torch
import xxhash
from torch import Tensor

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.plan import PULL_BYTES, Share
from moesaic.dispatch.gathered.shard import FileShard, Shard
from moesaic.errors import InvalidInput
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.transport.frame import HEADER_BYTES, Frame, FrameLimits


def pull_digest(model_digest: str, layout: ExpertLayout, share: Share) -> int:
    """64 bits that two workers share only if they mean the same bytes: of one checkpoint, packed for
    one kind of processor, divided in the same way."""
    return xxhash.xxh3_64_intdigest(f"{model_digest}|{layout.name}|{share}".encode())


# The largest messages of pulls: packed experts, or an error.
PULL_LIMITS = FrameLimits(
    max_rows=1, max_cols=PULL_BYTES // 4, max_bytes=HEADER_BYTES + PULL_BYTES + 4096
)


class Holder:
    """Answers pulls, on the event loop of the thread that moves weights: the engine may be computing.

    A pull's tensor is int64 ``[1, 2]``: where in the layer's share to begin, and how many bytes. The
    reply's are that part of the packed experts, int32 ``[1, bytes / 4]``, and the digests of its pieces,
    int64 ``[1, pieces]``: none if they were cut.
    """

    def __init__(
        self,
        layers: Collection[int],
        num_bytes: int,
        shard: Shard,
        digest: int,
        executor: Executor | None = None,
    ) -> None:
        """
        Args:
            layers: decoder layers of which there is something.
            num_bytes: the share of each.
            shard: has them.
            digest: which bytes are meant, see ``pull_digest``.
            executor: for reading a file, on one thread.
        """
        self._layers, self._num_bytes = layers, num_bytes
        self._shard, self._digest, self._executor = shard, digest, executor
        is_file = isinstance(shard, FileShard)
        self._buffer = torch.empty(PULL_BYTES if is_file else 0, dtype=torch.uint8)
        self._turn = asyncio.Lock()  # to use it

    async def answer(self, request: Frame) -> Frame:
        """Serve one pull.

        Raises:
            InvalidInput: other bytes are meant than those that are here, or there are none such.
            ExpertUnavailable: there could be, but are not now.
        """
        if request.digest != self._digest:
            raise InvalidInput(
                "frame.digest", "another model, processor or division of experts than here"
            )
        shapes = [(tuple(t.shape), t.dtype) for t in request.tensors]
        if shapes != [((1, 2), torch.int64)] or request.layer not in self._layers:
            raise InvalidInput("frame.layer", f"nothing of layer {request.layer} for {shapes}")
        start, length = request.tensors[0][0].tolist()
        if not (
            start >= 0
            and 4 <= length <= PULL_BYTES
            and start % 4 == length % 4 == 0
            and start + length <= self._num_bytes
        ):
            raise InvalidInput("frame.tensors", f"no {length} bytes from {start} here")
        digests = self._shard.digests(request.layer, start, length)
        if isinstance(self._shard, FileShard):
            part = await self._read(request.layer, start, length)
        else:
            part = self._shard.read(request.layer, start, length)
        metrics.SERVED_BYTES.inc(length)
        return request.reply(
            tensors=[part.view(torch.int32).unsqueeze(0), digests.unsqueeze(0)],
        )

    async def _read(self, layer: int, start: int, length: int) -> Tensor:
        """Part of the file, in memory that is used again in the loop's next turn: by then the reply
        has been written. One buffer is enough, for one thread reads."""
        loop = asyncio.get_running_loop()
        await self._turn.acquire()
        try:
            part = self._buffer[:length]
            await loop.run_in_executor(self._executor, self._shard.read_into, layer, start, part)
            return part
        finally:
            loop.call_soon(self._turn.release)
