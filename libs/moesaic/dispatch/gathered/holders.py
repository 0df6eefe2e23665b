"""Holders of a layer's bytes: workers with equal shares.

They live on the event loop of their network, and keep a link to every holder.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from moesaic.dispatch.gathered.peers import PEER_EVENTS, Peer
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.links import DialledLinks
from moesaic.experts.pull.client import PullClient
from moesaic.experts.pull.ranges import Runs, Share
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
    ) -> None:
        """See ``PullClient``; ``digests`` are by share."""
        self._network, self._digests, self._timeout_s = network, digests, timeout_s
        self._row_bytes = row_bytes
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
        if link is None:
            return
        digest = self._digests[peer.share]
        self._sources[peer] = PullClient(
            self._network, link, digest, self._row_bytes, self._timeout_s
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
