"""Links to the workers whose experts are pulled: dialled for as long as they are known."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.plan import Share
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

DIAL_TIMEOUT_S = 5.0
DIAL_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # the last one repeats


@dataclass(frozen=True)
class Peer:
    """A worker that holds a share."""

    worker_id: str
    generation: int
    address: str
    share: Share


class Peers:
    """Keeps a link to every peer. Lives on the event loop of ``network``."""

    def __init__(self, network: Network, on_linked: Callable[[Peer, Link], None]) -> None:
        self._network, self._on_linked = network, on_linked
        self._links: dict[Peer, Link] = {}
        self._dialling: dict[Peer, asyncio.Task[None]] = {}

    def set(self, peers: Sequence[Peer]) -> None:
        """Learn who there is now; links to others end."""
        for peer in [peer for peer in self._dialling if peer not in peers]:
            self._dialling.pop(peer).cancel()
        for peer in [peer for peer in self._links if peer not in peers]:
            self._links.pop(peer).discard("it has left")
        for peer in peers:
            if peer not in self._dialling:
                self._dialling[peer] = asyncio.ensure_future(self._keep(peer))
        self._count()

    async def close(self) -> None:
        """Drop all links."""
        tasks = list(self._dialling.values())
        self.set([])
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, peer: Peer) -> None:
        """Dial, and dial again whenever the link is gone."""
        failures = 0
        while True:
            link = self._links.get(peer)
            if link is not None and link.alive:
                await asyncio.sleep(DIAL_BACKOFF_S[-1])
                continue
            try:
                link = await self._network.connect(peer.address, peer.worker_id, DIAL_TIMEOUT_S)
            except Exception as error:  # of whatever kind: a later try may do better
                if failures in (0, 10):
                    log.warning("peer.unreachable", peer=peer.worker_id, cause=repr(error))
                self._count()
                await asyncio.sleep(DIAL_BACKOFF_S[min(failures, len(DIAL_BACKOFF_S) - 1)])
                failures += 1
                continue
            failures = 0
            self._links[peer] = link
            self._count()
            log.info(
                "peer.linked",
                peer=peer.worker_id,
                generation=peer.generation,
                share=str(peer.share),
            )
            self._on_linked(peer, link)

    def _count(self) -> None:
        metrics.PEERS.set(sum(link.alive for link in self._links.values()))
