"""The links of one network: both kinds, their heartbeat, and their common end."""

import asyncio
from collections.abc import Collection, Sequence
from typing import cast

from moesaic.errors import MoesaicError
from moesaic.transport import pulse
from moesaic.transport.contract import Handler, Link
from moesaic.transport.device_memory import settle
from moesaic.transport.dialled import DialledLink
from moesaic.transport.exchange import Exchange
from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.served import ServedLink
from moesaic.transport.wire import Wire


class Links:
    """The part of a network that does not depend on the carrier of its messages."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._dialled: set[DialledLink] = set()
        self._served: set[ServedLink] = set()
        self._left = asyncio.Event()  # a served peer has left
        self._heartbeat: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._dialled) + len(self._served)

    def dial(self, peer: str, wire: Wire) -> DialledLink:
        """Make the dialling end over an authenticated wire."""
        link = DialledLink(peer, wire, self._limits)
        self._dialled.add(link)
        if self._heartbeat is None:
            self._heartbeat = asyncio.get_running_loop().create_task(self._beat())
        return link

    def serve(self, peer: str, wire: Wire, handler: Handler) -> ServedLink:
        """Make the serving end over an authenticated wire."""
        link = ServedLink(peer, wire, handler, self._limits, self._forget)
        self._served.add(link)
        return link

    @property
    def served_peers(self) -> list[str]:
        """Worker ids of the peers that are served now, sorted."""
        return sorted(link.peer for link in self._served)

    async def all_left(self, besides: Collection[str] = ()) -> None:
        """Wait until no peer is served but those with worker ids in ``besides``."""
        while any(link.peer not in besides for link in self._served):
            self._left.clear()
            await self._left.wait()

    async def exchange(
        self, calls: Sequence[tuple[Link, Frame]], deadline_s: float
    ) -> list[Frame | MoesaicError]:
        """See ``Network.exchange``."""
        dialled = cast("Sequence[tuple[DialledLink, Frame]]", calls)
        for link, frame in dialled:
            if frame.parcels and not frame.settled and link.memory is not None:
                settle(link.memory.device)  # once for all links: they are of one network
                break
        return await Exchange(dialled, deadline_s).run()

    async def close(self) -> None:
        """End all links of both kinds and wait for the handlers."""
        if self._heartbeat:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
            self._heartbeat = None
        for link in self._dialled:
            link.discard("the network is closed")
        self._dialled.clear()
        served = list(self._served)
        for serving in served:
            serving.end()
        for serving in served:
            await serving.ended()

    def _forget(self, link: ServedLink) -> None:
        self._served.discard(link)
        self._left.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(pulse.INTERVAL_S)
            self._beat_once(asyncio.get_running_loop().time())

    def _beat_once(self, now: float) -> None:
        # Apart from the loop: that would hold the last link while it sleeps.
        for link in list(self._dialled):
            if link.alive:
                link.beat(now)
            else:
                self._dialled.discard(link)
