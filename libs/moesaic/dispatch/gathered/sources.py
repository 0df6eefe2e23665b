"""Sources of a layer's experts beside peers: the own share's file, and the checkpoint.

Threads that stay only copy. Computing, above all with torch, would give each of them its own pool of
OpenMP's threads.
"""

import asyncio
from concurrent.futures import Executor
from typing import Protocol

from torch import Tensor

from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pull.ranges import Runs, Share, rows_of
from moesaic.experts.pull.shard import Shard
from moesaic.native.own_thread import on_own_thread


class Source(Protocol):
    """Brings experts of one share, layers in the order in which they were asked for."""

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """Copy ``runs`` of the layer's share to the same places of ``into``, uint8 ``[bytes]``.

        Raises:
            MoesaicError: it cannot, or can no longer; some bytes may be there.
        """
        ...


class FromShard:
    """The own share, read beside the event loop."""

    def __init__(self, shard: Shard, executor: Executor) -> None:
        self._shard, self._executor = shard, executor

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """See ``Source``."""
        loop = asyncio.get_running_loop()
        for start, length in runs:
            part = into[start : start + length]
            await loop.run_in_executor(self._executor, self._shard.read_into, layer, start, part)


class FromCheckpoint:
    """A share that no worker holds now, read and packed anew, slowly."""

    def __init__(self, share: Share, plan: GatherPlan, files: ExpertFiles) -> None:
        self._experts, self._files = share.experts(plan.num_experts), files
        self._row_bytes = plan.expert_bytes
        self._turn = asyncio.Lock()

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        """See ``Source``."""
        rows, by_row = rows_of(runs, self._row_bytes), into.view(-1, self._row_bytes)
        experts = [self._experts[row] for row in rows]
        async with self._turn:
            await on_own_thread(self._files.pack, layer, experts, [by_row[row] for row in rows])
