"""Networks of one process that pass messages through memory on one event loop."""

import asyncio
import hmac
import itertools
from collections.abc import Collection, Sequence

from moesaic.errors import DeadlineExceeded, InvalidInput, MoesaicError, PeerLost
from moesaic.transport.contract import Handler, Link
from moesaic.transport.frame import Frame, FrameLimits, Message
from moesaic.transport.links import Links
from moesaic.transport.rings.channel import Channel
from moesaic.transport.wire import NOBODY, Parcels, Receiver


class Hub:
    """The "internet" of in-process networks: listeners by address."""

    def __init__(self) -> None:
        self._listeners: dict[str, tuple[InProcessNetwork, Handler]] = {}
        self._free_port = itertools.count(1)

    def bind(self, host: str, port: int, network: "InProcessNetwork", handler: Handler) -> str:
        """Let ``network`` listen.

        Raises:
            InvalidInput: the address is taken.
        """
        address = f"{host}:{port or next(self._free_port)}"
        if address in self._listeners:
            raise InvalidInput("address", f"{address} is taken")
        self._listeners[address] = (network, handler)
        return address

    def find(self, address: str) -> "tuple[InProcessNetwork, Handler] | None":
        """Find the listener at ``address``; None if there is none."""
        return self._listeners.get(address)

    def unbind(self, network: "InProcessNetwork") -> None:
        """Stop all listening of ``network``."""
        self._listeners = {
            a: entry for a, entry in self._listeners.items() if entry[0] is not network
        }


class InProcessNetwork:
    """A ``Network`` whose peers live in this process; messages are encoded and checked as between processes."""

    def __init__(self, worker_id: str, secret: bytes, limits: FrameLimits, hub: Hub) -> None:
        """Reach the networks that share ``hub``, as ``worker_id``."""
        self.worker_id, self._secret, self._hub = worker_id, secret, hub
        self._links = Links(limits)

    async def listen(self, host: str, port: int, handler: Handler) -> str:
        """See ``Network.listen``."""
        return self._hub.bind(host, port, self, handler)

    @property
    def linking(self) -> bool:
        """See ``Network.linking``: handshakes take no time here."""
        return False

    async def linked(self) -> None:
        """See ``Network.linked``."""

    async def connect(self, address: str, peer: str, deadline_s: float) -> Link:
        """See ``Network.connect``."""
        found = self._hub.find(address)
        if found is None:
            raise PeerLost(peer, f"no listener at {address}")
        far, handler = found
        if not hmac.compare_digest(self._secret, far._secret):
            raise PeerLost(peer, "auth failed: the cluster secrets differ")
        if far.worker_id != peer:
            raise PeerLost(peer, f"{address} is {far.worker_id!r}")
        near_wire, far_wire = _MemoryWire(), _MemoryWire()
        near_wire.other, far_wire.other = far_wire, near_wire
        link = near_wire.receiver = self._links.dial(peer, near_wire)
        far_wire.receiver = far._links.serve(self.worker_id, far_wire, handler)
        try:
            async with asyncio.timeout(deadline_s):
                await link.answered()
        except TimeoutError:
            raise DeadlineExceeded(f"connecting to {peer}", deadline_s * 1e3) from None
        return link

    async def exchange(
        self, calls: Sequence[tuple[Link, Frame]], deadline_s: float
    ) -> list[Frame | MoesaicError]:
        """See ``Network.exchange``."""
        return await self._links.exchange(calls, deadline_s)

    bell = -1  # no exchange goes without Python
    channels = None, 0

    @property
    def served_peers(self) -> list[str]:
        """See ``Network.served_peers``."""
        return self._links.served_peers

    async def all_left(self, besides: Collection[str] = ()) -> None:
        """See ``Network.all_left``."""
        await self._links.all_left(besides)

    async def close(self) -> None:
        """See ``Network.close``."""
        self._hub.unbind(self)
        await self._links.close()


class _MemoryWire:
    """One end of a pair; a message arrives in a later turn of the event loop, as from a socket."""

    channel: Channel | None = None
    parcels: Parcels | None = None
    other: "_MemoryWire"
    receiver: Receiver

    def __init__(self) -> None:
        self._open = True

    def send(self, message: Message) -> None:
        if self._open:
            asyncio.get_running_loop().call_soon(self.other._arrive, message)

    def close(self) -> None:
        if self._open:
            self._open, self.receiver = False, NOBODY
            asyncio.get_running_loop().call_soon(self.other._end)

    def _arrive(self, message: Message) -> None:
        if self._open:
            self.receiver.on_message(message)

    def _end(self) -> None:
        if self._open:
            receiver, self.receiver, self._open = self.receiver, NOBODY, False
            receiver.on_lost("the peer closed the connection")
