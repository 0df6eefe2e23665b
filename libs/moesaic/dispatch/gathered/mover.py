"""Carries out fills: brings each layer's experts to its slot of the ring, from whoever has them.

Lives on an event loop of its own thread, so that transfers go on, and peers are served, while the
engine computes. A source that fails is made up for by another holder, and in the end by the
checkpoint: a lost worker costs time, not requests.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from torch import Tensor

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.peers import Peer, Peers
from moesaic.dispatch.gathered.plan import PULL_BYTES, Runs, Share, StreamPlan, cut
from moesaic.dispatch.gathered.ring import Fill
from moesaic.dispatch.gathered.shard import PackedExperts, Shard
from moesaic.dispatch.gathered.sources import FromCheckpoint, FromPeer, FromShard, Source
from moesaic.errors import ExpertUnavailable, InvalidInput, MoesaicError
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()


class Mover:
    """Fills the ring of one worker; make it on the event loop that it is to use."""

    def __init__(
        self,
        plan: StreamPlan,
        memory: Sequence[Tensor],
        packed: PackedExperts,
        shard: Shard,
        executor: ThreadPoolExecutor,
        network: Network | None,
        digests: Mapping[Share, int],
        timeout_s: float,
    ) -> None:
        """
        Args:
            plan: what is streamed.
            memory: of each slot of the ring, uint8 ``[len(plan.streamed), nbytes]``.
            packed: what is left if nobody has a share.
            shard: the own share, asked for only if it is offloaded.
            executor: one thread, which reads files.
            network: to peers; ``None`` if there are none.
            digests: what to ask the holders of each share for; see ``pull_digest``.
            timeout_s: for one pull.
        """
        self._plan, self._memory = plan, memory
        self._digests, self._timeout_s, self._network = digests, timeout_s, network
        self._own = FromShard(shard, executor)
        self._checkpoint = {s: FromCheckpoint(s, plan, packed) for s in plan.streamed_shares}
        self._pulls: dict[Peer, FromPeer] = {}
        self._peers = Peers(network, self._linked) if network else None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fills: set[asyncio.Task[None]] = set()
        self._idle_since_s = 0.0  # when the last fill ended
        self.transfer_s: dict[int, float] = {}  # by layer, of its last fill

    def start(self, fill: Fill) -> None:
        """Begin ``fill``, behind those before it; from any thread."""
        self._loop.call_soon_threadsafe(self._begin, fill)

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Learn who holds which share now."""
        if self._peers is not None:
            wanted = [s for s in self._plan.streamed_shares if s != self._plan.share]
            self._peers.set([peer for peer in peers if peer.share in wanted])
            for gone in [peer for peer in self._pulls if peer not in peers]:
                del self._pulls[gone]

    @property
    def missing(self) -> list[Share]:
        """Shares that only the checkpoint has now."""
        return [s for s in self._plan.streamed_shares if s != self._plan.share and not self._of(s)]

    async def complete(self) -> None:
        """Wait until every share has a holder."""
        while self.missing:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Let go of peers, and fail what is under way."""
        for task in self._fills:
            task.cancel()
        await asyncio.gather(*self._fills, return_exceptions=True)
        if self._peers is not None:
            await self._peers.close()

    def _linked(self, peer: Peer, link: Link) -> None:
        assert self._network is not None
        digest = self._digests[peer.share]
        self._pulls[peer] = FromPeer(self._network, link, digest, self._timeout_s)
        self._changed.set()

    def _of(self, share: Share) -> list[tuple[str, Source]]:
        return [
            (peer.worker_id, source)
            for peer, source in self._pulls.items()
            if peer.share == share and source.usable and source.link.alive
        ]

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
            started = time.perf_counter()
            # All of them to the end, failed or not: then nothing writes to the slot any more.
            parts = self._parts(fill) if fill.wanted else []
            outcomes = await asyncio.gather(*parts, return_exceptions=True)
            now = time.perf_counter()
            taken_s = now - max(started, self._idle_since_s)  # those before it come first
            self._idle_since_s = now
            failures = [outcome for outcome in outcomes if outcome is not None]
            if not failures:
                self.transfer_s[fill.layer] = taken_s
                metrics.FETCH_SECONDS.observe(taken_s)
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
        """What brings each share to its rows of the slot."""
        parts, first = [], 0
        for share in self._plan.streamed_shares:
            count = len(share.experts(self._plan.num_experts))
            into = self._memory[fill.slot][first : first + count].view(-1)
            parts.append(self._bring(share, fill.layer, into))
            first += count
        return parts

    async def _bring(self, share: Share, layer: int, into: Tensor) -> None:
        runs = cut(len(into), PULL_BYTES)
        if share == self._plan.share:
            runs = await self._ask([("file", self._own)], layer, runs, into)
        while runs and (holders := self._of(share)):
            runs = await self._ask(holders, layer, runs, into)
        if runs:
            await self._checkpoint[share].bring(layer, runs, into)
            _count("checkpoint", runs)

    async def _ask(
        self, sources: list[tuple[str, Source]], layer: int, runs: Runs, into: Tensor
    ) -> Runs:
        """Divide ``runs`` among ``sources``; returns what has not come."""
        parts = [runs[idx :: len(sources)] for idx in range(len(sources))]
        outcomes = await asyncio.gather(
            *(s.bring(layer, part, into) for (_, s), part in zip(sources, parts, strict=True)),
            return_exceptions=True,
        )
        left: Runs = []
        for (name, source), part, outcome in zip(sources, parts, outcomes, strict=True):
            if outcome is None:
                _count(name, part)
                continue
            if not isinstance(outcome, MoesaicError | OSError):
                raise outcome
            left += part
            metrics.FAILED_PULLS.inc()
            log.warning("pull.failed", source=name, layer=layer, cause=str(outcome))
            if isinstance(source, FromPeer):
                # It means other bytes, and always will; or it is lost, and is dialled anew.
                source.usable = not isinstance(outcome, InvalidInput)
                if source.usable:
                    source.link.discard("a pull failed")
        return left


def _count(source: str, runs: Runs) -> None:
    metrics.FETCHED_BYTES.labels(source).inc(sum(length for _, length in runs))
