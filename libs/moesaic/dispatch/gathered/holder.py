"""The serving side of ``gathered``: gives peers the experts of this worker's share."""

import asyncio
from concurrent.futures import Executor

import torch
import xxhash

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.plan import Share, StreamPlan
from moesaic.dispatch.gathered.shard import MemoryShard, Shard
from moesaic.errors import InvalidInput
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.transport.frame import HEADER_BYTES, Frame, FrameKind, FrameLimits


def pull_digest(model_digest: str, layout: ExpertLayout, share: Share) -> int:
    """64 bits that two workers share only if they mean the same bytes: of one checkpoint, packed for
    one kind of processor, divided in the same way."""
    return xxhash.xxh3_64_intdigest(f"{model_digest}|{layout.name}|{share}".encode())


def pull_limits(plan: StreamPlan) -> FrameLimits:
    """The largest messages of pulls."""
    cols = plan.expert_bytes // 4
    most = HEADER_BYTES + plan.pull_experts * plan.expert_bytes
    return FrameLimits(max_rows=plan.pull_experts, max_cols=cols, max_bytes=most + 4096)


class Holder:
    """Answers pulls, on the event loop of the thread that moves weights: the engine may be computing.

    A pull's tensor is int32 ``[1, 2]``: the first row of the share, and how many. The reply's is the
    packed experts, int32 ``[n, nbytes / 4]``.
    """

    def __init__(self, plan: StreamPlan, shard: Shard, digest: int, executor: Executor) -> None:
        self._plan, self._shard, self._digest, self._executor = plan, shard, digest, executor
        self._num_rows = len(plan.share.experts(plan.num_experts))

    async def answer(self, request: Frame) -> Frame:
        """Serve one pull.

        Raises:
            InvalidInput: other bytes are meant than those that are here, or there are none such.
        """
        plan = self._plan
        if request.digest != self._digest:
            raise InvalidInput(
                "frame.digest", f"another model, processor or division than {plan.share} here"
            )
        shapes = [(tuple(t.shape), t.dtype) for t in request.tensors]
        if shapes != [((1, 2), torch.int32)] or request.layer not in plan.streamed_layers:
            raise InvalidInput("frame.layer", f"no streamed layer {request.layer} with {shapes}")
        first, count = request.tensors[0][0].tolist()
        if not (first >= 0 and 1 <= count <= plan.pull_experts and first + count <= self._num_rows):
            raise InvalidInput("frame.tensors", f"no {count} rows from {first} here")
        if isinstance(self._shard, MemoryShard):
            rows = self._shard.read(request.layer, first, count)
        else:
            rows = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._shard.read, request.layer, first, count
            )
        metrics.SERVED_BYTES.inc(rows.nbytes)
        return Frame(
            kind=FrameKind.REPLY,
            request_id=request.request_id,
            epoch=request.epoch,
            layer=request.layer,
            seq=request.seq,
            tensors=[rows.view(torch.int32)],
        )
