"""Holders of a layer's bytes: workers with equal shares, or the slots of expert workers.

Both live on the event loop of their network, and keep a link to every holder.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.peers import PEER_EVENTS, Peer
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.links import DialledLinks
from moesaic.experts.pull.client import PullClient
from moesaic.experts.pull.ranges import Runs, Share, extend
from moesaic.messages.placement import Placement
from moesaic.transport.contract import Link, Network

Asked = list[tuple[PullClient, Runs]]


class Holders(Protocol):
    """Finds peers that give experts."""

    def divide(
        self, share: Share, layer: int, runs: Runs, without: Collection[PullClient]
    ) -> tuple[Asked, Runs]:
        """Divide ``runs`` among the peers that hold them, except ``without``.

        Returns:
            Each peer with its part, and the runs that no peer holds.
        """
        ...

    @property
    def missing(self) -> list[Share]:
        """Shares that no peers hold as a whole now."""
        ...

    async def complete(self) -> None:
        """Wait until nothing is missing."""
        ...

    async def close(self) -> None:
        """Drop all links."""
        ...


class Linked:
    """A client for each peer that is linked."""

    def __init__(
        self,
        network: Network,
        digests: Mapping[Share, int],
        row_bytes: int,
        timeout_s: float,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        """See ``PullClient``; ``digests`` are by share, ``turns`` for all peers together."""
        self._network, self._digests, self._timeout_s = network, digests, timeout_s
        self._row_bytes = row_bytes
        self._turns = turns
        self._sources: dict[Peer, PullClient] = {}
        self._changed = asyncio.Event()
        self._links: DialledLinks[Peer] = DialledLinks(
            network, PEER_EVENTS, self._dialled, redial=True
        )

    def set(self, peers: Sequence[Peer]) -> None:
        """Learn the peers of now; links to others end."""
        self._links.keep(peers)
        for peer in peers:
            self._links.dial(peer)
        metrics.PEERS.set(self._links.num_alive)
        for gone in [peer for peer in self._sources if peer not in peers]:
            del self._sources[gone]
        self.change()

    def usable(self) -> dict[Peer, PullClient]:
        """Clients of the peers that can be asked now."""
        return {p: s for p, s in self._sources.items() if s.usable and s.link.alive}

    def change(self) -> None:
        """Wake the waiters of ``changed``."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait for the next change."""
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Drop all links."""
        await self._links.close()

    def _dialled(self, peer: Peer, link: Link | None) -> None:
        metrics.PEERS.set(self._links.num_alive)
        if link is None:
            return
        digest = self._digests[peer.share]
        self._sources[peer] = PullClient(
            self._network, link, digest, self._row_bytes, self._timeout_s, self._turns
        )
        self.change()


class ShareHolders:
    """Attention workers that hold a share of every layer each."""

    def __init__(self, plan: GatherPlan, linked: Linked) -> None:
        self._wanted = [share for share in plan.gathered_shares if share != plan.share]
        self._linked = linked

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Learn the workers that hold shares now."""
        self._linked.set([peer for peer in peers if peer.share in self._wanted])

    def divide(
        self, share: Share, layer: int, runs: Runs, without: Collection[PullClient]
    ) -> tuple[Asked, Runs]:
        """See ``Holders``; holders of the same share take turns."""
        sources = [s for s in self._of(share) if s not in without]
        asked = [(s, runs[idx :: len(sources)]) for idx, s in enumerate(sources)]
        return [(s, part) for s, part in asked if part], [] if sources else runs

    @property
    def missing(self) -> list[Share]:
        """See ``Holders``."""
        return [share for share in self._wanted if not self._of(share)]

    async def complete(self) -> None:
        """See ``Holders``."""
        while self.missing:
            await self._linked.changed()

    async def close(self) -> None:
        """See ``Holders``."""
        await self._linked.close()

    def _of(self, share: Share) -> list[PullClient]:
        return [s for peer, s in self._linked.usable().items() if peer.share == share]


class PlacedHolders:
    """Expert workers, each with the experts that the placement put into its slots."""

    def __init__(self, plan: GatherPlan, linked: Linked) -> None:
        self._plan, self._linked = plan, linked
        self._placement: Placement | None = None

    def set_placement(self, placement: Placement) -> None:
        """Learn a committed placement; earlier ones change nothing."""
        if self._placement is None or placement.epoch > self._placement.epoch:
            self._placement = placement
            self._linked.set(
                [
                    Peer(worker.worker_id, worker.generation, worker.weights_address, Share())
                    for worker in placement.workers
                    if worker.weights_address
                ]
            )

    def divide(
        self, share: Share, layer: int, runs: Runs, without: Collection[PullClient]
    ) -> tuple[Asked, Runs]:
        """See ``Holders``; the replicas of an expert take turns by layer."""
        by_holder: defaultdict[PullClient | None, Runs] = defaultdict(list)
        holders = [
            [source for source in sources if source not in without]
            for sources in self._by_expert(layer)
        ]
        for start, length in runs:
            for part_start, part_length in _parts(start, length, self._plan.expert_bytes):
                expert = part_start // self._plan.expert_bytes
                sources = holders[expert]
                holder = sources[(expert + layer) % len(sources)] if sources else None
                extend(by_holder[holder], part_start, part_length, self._plan.expert_bytes)
        nobody = by_holder.pop(None, [])
        return [(holder, part) for holder, part in by_holder.items() if holder is not None], nobody

    @property
    def missing(self) -> list[Share]:
        """See ``Holders``."""
        layers = self._plan.gathered_layers
        whole = all(sources for layer in layers for sources in self._by_expert(layer))
        return [] if whole else [self._plan.share]

    async def complete(self) -> None:
        """See ``Holders``."""
        while self.missing:
            await self._linked.changed()

    async def close(self) -> None:
        """See ``Holders``."""
        await self._linked.close()

    def _by_expert(self, layer: int) -> list[list[PullClient]]:
        """Clients of the holders of each expert of a layer, in the placement's order."""
        if self._placement is None:
            return [[] for _ in range(self._plan.num_experts)]
        usable = {peer.worker_id: source for peer, source in self._linked.usable().items()}
        workers = [usable.get(worker.worker_id) for worker in self._placement.workers]
        return [
            [source for idx in held if (source := workers[idx]) is not None]
            for held in self._placement.holders(layer)
        ]


def _parts(start: int, length: int, row_bytes: int) -> Runs:
    """A run, cut where rows end."""
    end = start + length
    inner = range((start // row_bytes + 1) * row_bytes, end, row_bytes)
    return [(a, b - a) for a, b in zip((start, *inner), (*inner, end), strict=True)]
