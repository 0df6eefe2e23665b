"""The links of one network: both kinds, their heartbeat, and their common end."""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import cast

from moesaic.errors import DeadlineExceeded, MoesaicError
from moesaic.transport import pulse
from moesaic.transport.contract import Handler, Link
from moesaic.transport.device_memory import settle
from moesaic.transport.dialled import DialledLink
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
                # Once for all links: they are of one network.
                settle(link.memory.device)
                break
        return await _Exchange(dialled, deadline_s).run()

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


class _Exchange:
    """Frames that are sent and awaited together: one outcome for each call, whatever happens to its link."""

    def __init__(self, calls: Sequence[tuple[DialledLink, Frame]], deadline_s: float) -> None:
        self._calls, self._deadline_s = calls, deadline_s
        self._outcomes: list[Frame | MoesaicError | None] = [None] * len(calls)
        self._missing = len(calls)
        self._done = asyncio.get_running_loop().create_future()

    async def run(self) -> list[Frame | MoesaicError]:
        """Send, and wait for every outcome; see ``Network.exchange``."""
        if not self._calls:
            return []
        timer = asyncio.get_running_loop().call_later(self._deadline_s, self._expire)
        try:
            for idx, (link, frame) in enumerate(self._calls):
                link.call(frame, partial(self._settle, idx))
            await self._done
        except asyncio.CancelledError:
            self._give_up("cancelled")
            raise
        finally:
            timer.cancel()
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _settle(self, idx: int, outcome: Frame | MoesaicError) -> None:
        """Give call ``idx`` its outcome; the first one stands."""
        if self._outcomes[idx] is not None:
            return
        self._outcomes[idx] = outcome
        self._missing -= 1
        if self._missing == 0 and not self._done.done():
            self._done.set_result(None)

    def _expire(self) -> None:
        self._give_up(f"no answer within {self._deadline_s * 1e3:.0f} ms")

    def _give_up(self, cause: str) -> None:
        late = [idx for idx, outcome in enumerate(self._outcomes) if outcome is None]
        # All are settled first: a discarded link would call its other calls lost.
        for idx in late:
            link, frame = self._calls[idx]
            what = f"layer {frame.layer} on {link.peer}"
            self._settle(idx, DeadlineExceeded(what, self._deadline_s * 1e3))
        for idx in late:
            self._calls[idx][0].discard(cause)
