"""Carries out fills: brings each layer's experts to its buffer of the ring.

Lives on an event loop of its own thread, so transfers go on, and peers are served, while the engine
computes. Another holder makes up for a source that fails, and in the end the checkpoint: a lost
worker costs time, not requests.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from torch import Tensor

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.holders import Holders
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.gathered.ring import Fill
from moesaic.dispatch.gathered.sources import FromCheckpoint, FromShard, Source
from moesaic.errors import ExpertUnavailable, MoesaicError
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pull.client import DamagedExpert, PullClient
from moesaic.experts.pull.ranges import Runs, Share, messages_of
from moesaic.experts.pull.shard import Shard

log = structlog.get_logger()


class Mover:
    """Fills the ring of one worker; make it on the event loop that it is to use."""

    def __init__(
        self,
        plan: GatherPlan,
        memory: Sequence[Tensor],
        files: ExpertFiles,
        shard: Shard,
        executor: ThreadPoolExecutor,
        holders: Holders | None,
    ) -> None:
        """
        Args:
            plan: the experts that are gathered.
            memory: memory of each buffer of the ring, uint8 ``[len(plan.gathered), nbytes]``.
            files: the last source, if no worker has a share.
            shard: the own share, asked for only if it is offloaded.
            executor: one thread, which reads files.
            holders: peers that give experts; ``None`` if there are none.
        """
        self._plan, self._memory, self._holders = plan, memory, holders
        self._own = FromShard(shard, executor)
        self._checkpoint = {s: FromCheckpoint(s, plan, files) for s in plan.gathered_shares}
        self._loop = asyncio.get_running_loop()
        self._fills: set[asyncio.Task[None]] = set()
        self._idle_since_s = 0.0  # when the last fill ended
        self.transfer_s: dict[int, float] = {}  # by layer, of its last fill

    def start(self, fill: Fill) -> None:
        """Begin ``fill`` after earlier ones; from any thread."""
        self._loop.call_soon_threadsafe(self._begin, fill)

    async def close(self) -> None:
        """Close links to peers, and fail the fills in progress."""
        for task in self._fills:
            task.cancel()
        await asyncio.gather(*self._fills, return_exceptions=True)
        if self._holders is not None:
            await self._holders.close()

    def _begin(self, fill: Fill) -> None:
        task = asyncio.ensure_future(self._fill(fill))
        self._fills.add(task)
        task.add_done_callback(self._fills.discard)

    async def _fill(self, fill: Fill) -> None:
        error: BaseException = ExpertUnavailable(fill.layer, cause="this worker is stopping")
        try:
            if fill.after is not None:
                await fill.after.ended()
                fill.after = None
            # The buffer still has another layer's experts.
            if not fill.wanted:
                error = ExpertUnavailable(fill.layer, cause="it is no longer wanted")
                return
            started = time.perf_counter()
            # All of them to the end, failed or not: then nothing writes to the buffer any more.
            outcomes = await asyncio.gather(*self._parts(fill), return_exceptions=True)
            now = time.perf_counter()
            # Those before it come first.
            taken_s = now - max(started, self._idle_since_s)
            self._idle_since_s = now
            failures = [outcome for outcome in outcomes if outcome is not None]
            if not failures:
                self.transfer_s[fill.layer] = taken_s
                metrics.GATHER_SECONDS.observe(taken_s)
                fill.done.set_result(None)
                return
            error = failures[0]
            if not isinstance(error, MoesaicError):
                log.error("fill.failed", layer=fill.layer, exc_info=error)
                error = ExpertUnavailable(fill.layer, cause=repr(error))
        finally:
            if not fill.done.done():
                fill.done.set_exception(error)

    def _parts(self, fill: Fill) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that bring each share to its rows of the buffer."""
        parts, first = [], 0
        for share in self._plan.gathered_shares:
            count = len(share.experts(self._plan.num_experts))
            into = self._memory[fill.buffer][first : first + count].view(-1)
            parts.append(self._bring(share, fill.layer, into))
            first += count
        return parts

    async def _bring(self, share: Share, layer: int, into: Tensor) -> None:
        """Bring one share of a layer from the sources that have it.

        | share | sources, in order |
        |---|---|
        | own | file, peers, checkpoint |
        | another's | peers, checkpoint |
        """
        runs = messages_of(len(into), self._plan.expert_bytes)
        ways = [self._from_peers]
        if share == self._plan.share:
            ways = [self._from_file, self._from_peers]
        for way in ways:
            runs = await way(share, layer, runs, into)
        if runs:
            await self._checkpoint[share].bring(layer, runs, into)
            _count("checkpoint", runs)

    async def _from_file(self, share: Share, layer: int, runs: Runs, into: Tensor) -> Runs:
        """Bring runs from the own file.

        Returns:
            Runs that have not come.
        """
        return await self._ask([("file", self._own, runs)], layer, into) if runs else runs

    async def _from_peers(self, share: Share, layer: int, runs: Runs, into: Tensor) -> Runs:
        """Bring runs from peers that hold them.

        Returns:
            Runs that have not come from any peer.
        """
        left: Runs = []
        without: set[PullClient] = set()  # those that have failed
        while runs and self._holders is not None:
            asked, nobody = self._holders.divide(share, layer, runs, without)
            left += nobody
            parts = [(source.link.peer, source, part) for source, part in asked]
            runs = await self._ask(parts, layer, into, without)
        return left + runs

    async def _ask(
        self,
        parts: Sequence[tuple[str, Source, Runs]],
        layer: int,
        into: Tensor,
        failed: set[PullClient] | None = None,
    ) -> Runs:
        """Have all parts brought; peers that fail are added to ``failed``.

        Returns:
            Runs that have not come.
        """
        outcomes = await asyncio.gather(
            *(source.bring(layer, part, into) for _, source, part in parts), return_exceptions=True
        )
        left: Runs = []
        for (name, source, part), outcome in zip(parts, outcomes, strict=True):
            if outcome is None:
                _count(name, part)
                continue
            if not isinstance(outcome, MoesaicError | OSError):
                raise outcome
            left += part
            metrics.FAILED_PULLS.inc()
            metrics.DAMAGED_PULLS.inc(isinstance(outcome, DamagedExpert))
            log.warning("pull.failed", source=name, layer=layer, cause=str(outcome))
            if isinstance(source, PullClient) and failed is not None:
                failed.add(source)
                source.failed(outcome)
        return left


def _count(source: str, runs: Runs) -> None:
    metrics.GATHERED_BYTES.labels(source).inc(sum(length for _, length in runs))
