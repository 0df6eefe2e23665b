"""Carries out fills: brings each layer's experts to its buffer of the ring.

Lives on an event loop of its own thread, so transfers go on, and peers are served, while the engine
computes. Another holder makes up for a source that fails, and in the end the checkpoint: a lost
worker costs time, not requests.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from torch import Tensor

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.device import DeviceBuffers, Event
from moesaic.dispatch.gathered.holders import Holders
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.gathered.ring import Fill
from moesaic.dispatch.gathered.sources import FromCheckpoint, FromShard, Source
from moesaic.errors import ExpertUnavailable, MoesaicError
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pull.client import DamagedExpert, PullClient
from moesaic.experts.pull.ranges import Runs, Share, messages_of
from moesaic.experts.pull.shard import MemoryShard, Shard

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
        device: DeviceBuffers | None = None,
    ) -> None:
        """
        Args:
            plan: the experts that are gathered.
            memory: the host's memory of each buffer of the ring, uint8 ``[len(plan.gathered), nbytes]``.
            files: the last source, if no worker has a share.
            shard: the own share, asked for only if it is offloaded or copied to a device.
            executor: one thread, which reads files.
            holders: peers that give experts; ``None`` if there are none.
            device: buffers on a device, where experts go from ``memory``; ``None``: the host computes.
        """
        self._plan, self._memory, self._holders = plan, memory, holders
        self._shard, self._own, self._device = shard, FromShard(shard, executor), device
        self._checkpoint = {s: FromCheckpoint(s, plan, files) for s in plan.gathered_shares}
        self._loop = asyncio.get_running_loop()
        self._fills: set[asyncio.Task[None]] = set()
        self._latest: Fill | None = None  # of those begun
        self._idle_since_s = 0.0  # when the last fill ended
        self._fetch_s: dict[int, float] = {}  # by layer, of its last fill
        self._copies: dict[
            int, tuple[Event, Event]
        ] = {}  # by layer: before and after its last ones

    @property
    def transfer_s(self) -> dict[int, float]:
        """Times of the last fill of each layer: of fetching or of copying, whichever is longer."""
        times = dict(self._fetch_s)
        if self._device is None:
            return times
        seconds, copies = self._device.streams.seconds, dict(self._copies)
        return {at: max(fetch_s, seconds(*copies[at])) for at, fetch_s in times.items()}

    def start(self, fill: Fill) -> None:
        """Begin ``fill`` after earlier ones; from any thread."""
        self._loop.call_soon_threadsafe(self._begin, fill)

    async def close(self) -> None:
        """Close links to peers, and fail the fills in progress; copies to a device may go on."""
        for task in self._fills:
            task.cancel()
        await asyncio.gather(*self._fills, return_exceptions=True)
        if self._holders is not None:
            await self._holders.close()

    def _begin(self, fill: Fill) -> None:
        before, self._latest = self._latest, fill
        task = asyncio.ensure_future(self._fill(fill, before))
        self._fills.add(task)
        task.add_done_callback(self._fills.discard)

    async def _fill(self, fill: Fill, before: Fill | None) -> None:
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
            failure = await self._filled(fill, before)
            now = time.perf_counter()
            # Those before it come first.
            taken_s = now - max(started, self._idle_since_s)
            self._idle_since_s = now
            if failure is None:
                self._fetch_s[fill.layer] = taken_s
                metrics.GATHER_SECONDS.observe(taken_s)
                fill.done.set_result(None)
                return
            error = failure
            if not isinstance(error, MoesaicError):
                log.error("fill.failed", layer=fill.layer, exc_info=error)
                error = ExpertUnavailable(fill.layer, cause=repr(error))
        finally:
            if not fill.done.done():
                fill.done.set_exception(error)

    async def _filled(self, fill: Fill, before: Fill | None) -> BaseException | None:
        """Bring each share of a layer to its rows of the buffer.

        Returns:
            The first error there is; by then nothing writes to the buffer any more.
        """
        try:
            if self._device is not None:
                return await self._uploaded(self._device, fill, before)
            brought = (self._bring(*part, fill.layer) for part in self._staged(fill).values())
            return await _first_error(brought)
        except Exception as error:
            return error

    async def _uploaded(
        self, device: DeviceBuffers, fill: Fill, before: Fill | None
    ) -> BaseException | None:
        """Copy each share to the device as soon as it is here, after all copies of the fill ``before``.

        Copies of this fill may have to wait for kernels, which those of the one before must not.
        """
        await device.copied(fill.buffer)
        begun: list[Event] = []

        async def up(first: int, rows: Tensor, share: Share | None) -> None:
            if share is not None:
                await self._bring(share, rows, fill.layer)
            if before is not None:
                await before.ended()
            if not begun:
                begun.append(device.begin(fill))
            device.copy(fill, first, rows)

        parts = [up(first, rows, share) for first, (share, rows) in self._staged(fill).items()]
        if self._plan.in_memory:
            assert isinstance(self._shard, MemoryShard)
            parts.append(up(len(self._plan.gathered), self._shard.rows[fill.layer], None))
        try:
            return await _first_error(parts)
        finally:
            if begun:
                self._copies[fill.layer] = begun[0], device.end(fill)

    def _staged(self, fill: Fill) -> dict[int, tuple[Share, Tensor]]:
        """The shares that are gathered and their memory, uint8 ``[n, nbytes]``, by the first row."""
        staged, first = {}, 0
        for share in self._plan.gathered_shares:
            count = len(share.experts(self._plan.num_experts))
            staged[first] = share, self._memory[fill.buffer][first : first + count]
            first += count
        return staged

    async def _bring(self, share: Share, rows: Tensor, layer: int) -> None:
        """Bring one share of a layer to ``rows``, uint8 ``[n, nbytes]``, from the sources that have it.

        | share | sources, in order |
        |---|---|
        | own | file, peers, checkpoint |
        | another's | peers, checkpoint |
        """
        into = rows.view(-1)
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


async def _first_error(parts: Iterable[Coroutine[Any, Any, None]]) -> BaseException | None:
    """Await all parts to their ends, failed or not."""
    outcomes = await asyncio.gather(*parts, return_exceptions=True)
    return next((outcome for outcome in outcomes if outcome is not None), None)


def _count(source: str, runs: Runs) -> None:
    metrics.GATHERED_BYTES.labels(source).inc(sum(length for _, length in runs))
