"""The network between processes: authenticated over TCP, then the best plane that both ends have.

A listener is a plain TCP socket. Only peers that have proved the cluster secret go on, by rings in
shared memory within a host, by this connection between hosts, or by UCX. They alone learn a UCX
address, and the tags of their messages are drawn from the session key; messages with any other tag
are dropped. Each process has one UCX worker per plane of UCX.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
import torch

from moesaic.addresses import host_port
from moesaic.errors import DeadlineExceeded, FrameError, InUse, InvalidInput, MoesaicError, PeerLost
from moesaic.loopback import is_loopback
from moesaic.messages.registry import Weights
from moesaic.native.library import lib, library
from moesaic.transport.contract import Handler, Link
from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.dialled import DialledLink
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.links import Links
from moesaic.transport.rings.channel import Channel, answers_to_pings
from moesaic.transport.rings.meeting import Meeting, meet
from moesaic.transport.rings.plane import RingPlane
from moesaic.transport.ucx import door, handshake
from moesaic.transport.ucx.bindings import UCXError, UcxWorker
from moesaic.transport.ucx.door import Door
from moesaic.transport.ucx.handshake import Handshakes, Session
from moesaic.transport.ucx.interfaces import between_hosts
from moesaic.transport.ucx.parcels import frame_tag
from moesaic.transport.ucx.planes import (
    PARCELS,
    RING,
    SOCKET,
    PlaneChoice,
    PlaneOffer,
    Transports,
    best_first,
    choose_plane,
    planes_of,
    rings_lead_to,
    shared_memory_id,
)
from moesaic.transport.ucx.wires import ChannelWire, UcxWire, ring_channel, socket_wire
from moesaic.transport.wire import Wire

log = structlog.get_logger()

_Message = TypeVar("_Message")

MAX_LINKS = 4096
UCX_TCP_IS_OPEN = (
    "'tcp' lets anybody on the network of --data-host send to UCX, which a wrong message ends; use "
    "'socket' or 'auto', or say --private-network if only this cluster is on that network"
)


class UcxNetwork:
    """A ``Network`` of processes."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        secret: bytes,
        limits: FrameLimits,
        transports: Transports = "auto",
        own_address: str | None = None,
        private: bool = False,
        device: torch.device | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Open the transports; call it on the event loop that will own the network.

        Args:
            worker_id: this process's name for its peers.
            role: role of this process, such as "expert".
            secret: the cluster secret.
            limits: the largest frames to accept.
            transports: "tcp", "shm" (both by UCX), "ring" or "socket" alone, or "auto". With
                "auto", processes of one host use rings in shared memory. Hosts use UCX with RDMA
                devices that ``UCX_NET_DEVICES`` names or on a private network, else the
                authenticated connection.
            own_address: address of this machine; tensors use only its network. ``None``: loopback.
            private: that network is private, so UCX may use TCP on it.
            device: device whose memory parcels come from and arrive in, with peers that have one
                too; ``None``: all tensors travel within frames.
            weights: weights of this worker; peers with others are refused. ``None``: any.

        Raises:
            InvalidInput: this machine does not offer the transports, or has no such address.
        """
        self._worker_id, self._role, self._secret = worker_id, role, secret
        self._weights = weights
        self._links = Links(limits)
        self._memory = None if device is None else DeviceMemory(device)
        self._max_bytes, self._transports = limits.max_bytes, transports
        self._kinds = self._kinds_of(own_address, private, device)
        self._rings = RingPlane() if library() else None  # all channels, of whatever kind
        self._meets = self._rings is not None and transports in ("auto", "ring")
        if transports == "ring" and not self._meets:
            raise InvalidInput("transports", "'ring' needs a C compiler here: install gcc")
        self._handshakes = Handshakes()
        try:
            self._planes = self._open_all()
        except UCXError as error:
            raise InvalidInput(
                "transports", f"UCX does not offer {transports!r} here: {error}"
            ) from error
        self._doors: list[Door] = []
        # Until `answer_by`: pings only, so that this side is there for its peers while it computes.
        self._pings = self._answers = answers_to_pings(limits) if self._rings is not None else 0
        self._retired: list[UcxWorker] = []

    @property
    def bell(self) -> int:
        """See ``Network.bell``."""
        return self._rings.bell if self._rings is not None and self._rings.by_selector else -1

    @property
    def channels(self) -> tuple[Any, int]:
        """See ``Network.channels``."""
        return (None, 0) if self._rings is None else self._rings.c_channels

    @property
    def linking(self) -> bool:
        """See ``Network.linking``; strangers without the secret do not count."""
        return self._handshakes.under_way

    async def linked(self) -> None:
        """See ``Network.linked``."""
        await self._handshakes.ended()

    def answer_by(self, answers: int) -> None:
        """Let requests that come through channels be answered by native ``answers``, from now on."""
        self._answers = answers

    async def listen(self, host: str, port: int, handler: Handler) -> str:
        """See ``Network.listen``."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family, backlog=door.BACKLOG)
        except OSError as error:
            raise InUse(
                "data_port",
                f"cannot listen on {host_port(host, port)}: {error.strerror}; choose another with "
                "--data-port or --host",
            ) from error
        sock.setblocking(False)
        bound = host_port(*sock.getsockname()[:2])
        admit = partial(self._admit, handler=handler)
        self._doors.append(Door(sock, admit, lambda: len(self._links) >= MAX_LINKS))
        return bound

    async def connect(self, address: str, peer: str, deadline_s: float) -> Link:
        """See ``Network.connect``."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(deadline_s):
                with self._handshakes.one():
                    link = await self._dial(host.strip("[]"), int(port), peer)
                    await link.answered()
                return link
        except TimeoutError:
            raise DeadlineExceeded(f"connecting to {peer} at {address}", deadline_s * 1e3) from None
        except (OSError, ValueError) as error:
            raise PeerLost(peer, f"cannot reach {address}: {error}") from error
        except FrameError as error:
            raise PeerLost(peer, f"{address} is not one of our listeners: {error}") from error

    async def exchange(
        self, calls: Sequence[tuple[Link, Frame]], deadline_s: float
    ) -> list[Frame | MoesaicError]:
        """See ``Network.exchange``."""
        return await self._links.exchange(calls, deadline_s)

    @property
    def served_peers(self) -> list[str]:
        """See ``Network.served_peers``."""
        return self._links.served_peers

    async def all_left(self, besides: Collection[str] = ()) -> None:
        """See ``Network.all_left``."""
        await self._links.all_left(besides)

    async def close(self) -> None:
        """See ``Network.close``."""
        doors, self._doors = self._doors, []
        for entrance in doors:
            await entrance.close()
        await self._links.close()
        for retired in self._retired:
            retired.destroy()
        for plane in self._planes.values():
            await plane.close()
        self._planes = {}
        if self._rings is not None:
            self._rings.close()
            self._rings = None
            lib().answers_close(answers=self._pings)

    def _kinds_of(
        self, own_address: str | None, private: bool, device: torch.device | None
    ) -> dict[str, tuple[dict[str, str], bool]]:
        outward = own_address is not None and not is_loopback(own_address)
        if self._transports == "tcp" and outward and not private:
            raise InvalidInput("transports", UCX_TCP_IS_OPEN)
        between = between_hosts(own_address, private)
        return planes_of(self._transports, between, device, rings=library() is not None)

    def _open_all(self) -> dict[str, UcxWorker]:
        opened: dict[str, UcxWorker] = {}
        for name in self._kinds:
            try:
                opened[name] = self._open(name)
            except UCXError as error:
                if name not in PARCELS:
                    raise
                # Within frames, then
                log.warning("parcels.impossible", cause=str(error))
        return opened

    def _open(self, name: str) -> UcxWorker:
        memory = self._memory if name in PARCELS else None
        renew = partial(self._renew, name)
        return UcxWorker(*self._kinds[name], self._max_bytes, renew, self._rings, memory)

    def _renew(self, name: str) -> None:
        """Replace the UCX worker of a plane on which a dead peer has messages outstanding.

        The peer will never take them, and until then the worker would keep the processor busy. The
        other peers on the plane dial again.
        """
        stuck = self._planes[name]
        try:
            self._planes[name] = self._open(name)
        except UCXError as error:  # then it goes on, restless
            log.error("plane.stuck", plane=name, cause=str(error))
            return
        log.warning("plane.renewed", plane=name)
        stuck.retire("its plane was renewed after another peer's death")
        self._retired.append(stuck)

    async def _dial(self, host: str, port: int, peer: str) -> DialledLink:
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, where = (
            await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )[0]
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
            session = await handshake.dial(sock, self._secret, self._worker_id, self._role, peer)
            offered = dict(self._planes)
            addresses = {name: plane.address for name, plane in offered.items()}
            if SOCKET in self._own_planes():
                addresses[SOCKET] = b""
            with ExitStack() as places:
                meeting: Meeting | None = None
                if self._rings is not None and self._meets:
                    meeting = Meeting(self._rings.bell, session.token(RING))
                    places.callback(meeting.close)
                    addresses[RING] = meeting.name
                offer = PlaneOffer(shared_memory_id(), addresses, self._weights)
                await session.send(sock, FrameKind.OFFER, msgspec.msgpack.encode(offer))
                choice = _decode(await session.receive(sock, FrameKind.ACCEPT), PlaneChoice)
                wire: Wire
                if choice.plane not in addresses:
                    raise FrameError("plane", f"{choice.plane!r} was not offered")
                frames: Channel | None = None
                if choice.plane == RING or choice.ring_frames:
                    if meeting is None:
                        raise FrameError("ring_frames", "rings were not offered")
                    memory, bell = await meeting.met()
                    frames = ring_channel(memory, bell, 0, sock, self._max_bytes)
                if choice.plane == RING and frames is not None and self._rings is not None:
                    wire = ChannelWire(self._rings, frames, sock)
                elif choice.plane == SOCKET:
                    wire = socket_wire(self._rings, sock, self._max_bytes)
                else:
                    if offered.get(choice.plane) is not self._planes.get(choice.plane):
                        raise PeerLost(peer, f"{choice.plane} was renewed while it was dialled")
                    tags = (session.tag("dialler"), session.tag("listener"))
                    wire = self._wire(sock, peer, choice.plane, choice.address, tags, frames)
            # Nothing may be awaited from here on: a wire without a receiver cannot tell of its end.
            link = wire.receiver = self._links.dial(peer, wire)
            undo.pop_all()
            return link

    async def _admit(
        self, sock: socket.socket, on_seal: Callable[[], None], handler: Handler
    ) -> None:
        """Let a stranger prove itself, then serve it."""
        with ExitStack() as counted:
            # Those of strangers take nobody's time.
            def sealed() -> None:
                counted.enter_context(self._handshakes.one())
                on_seal()

            await self._admit_sealed(sock, sealed, handler)

    async def _admit_sealed(
        self, sock: socket.socket, on_seal: Callable[[], None], handler: Handler
    ) -> None:
        session = await handshake.accept(sock, self._secret, self._worker_id, self._role, on_seal)
        offer = _decode(await session.receive(sock, FrameKind.OFFER), PlaneOffer)
        if self._weights and offer.weights and (unlike := self._weights.unlike(offer.weights)):
            cause = f"its weights are others: {unlike}"
            await handshake.refuse(sock, PeerLost(self._worker_id, cause))
            raise PeerLost(session.peer, cause)
        own = self._own_planes()
        plane = choose_plane(offer, own)
        wire: Wire | None = None
        frames: Channel | None = None
        # Small frames beside parcels too.
        if self._meets and (plane == RING or (plane in PARCELS and rings_lead_to(offer))):
            frames = await self._join(offer.addresses[RING], session, sock)
            if frames is None:
                own.remove(RING)
                plane = choose_plane(offer, own)
        if plane == RING and frames is not None and self._rings is not None:
            wire = ChannelWire(self._rings, frames, sock)
        tags = (session.tag("listener"), session.tag("dialler"))
        with ExitStack() as undo:
            if wire is None and plane == SOCKET:
                wire = socket_wire(self._rings, sock, self._max_bytes)
            if wire is None:
                wire = self._wire(sock, session.peer, plane, offer.addresses[plane], tags, frames)
            link = wire.receiver = self._links.serve(session.peer, wire, handler)
            if self._answers and wire.channel is not None:
                wire.channel.answer_by(self._answers)
            undo.callback(link.end)
            carrier = self._planes.get(plane)
            choice = PlaneChoice(
                plane,
                carrier.address if carrier is not None else b"",
                ring_frames=plane in PARCELS and frames is not None,
            )
            await session.send(sock, FrameKind.ACCEPT, msgspec.msgpack.encode(choice))
            undo.pop_all()
        log.info("peer.joined", peer=session.peer, plane=plane)

    async def _join(self, name: bytes, session: Session, sock: socket.socket) -> Channel | None:
        """Meet a dialler of this host; ``None`` if it cannot be met, as in another network."""
        assert self._rings is not None
        try:
            memory, bell = await meet(name, session.token(RING), self._rings.bell)
        except OSError as error:
            log.info("meeting.failed", peer=session.peer, cause=str(error))
            return None
        return ring_channel(memory, bell, 1, sock, self._max_bytes)

    def _own_planes(self) -> list[str]:
        return best_first(self._planes, self._transports, self._meets)

    def _wire(
        self,
        sock: socket.socket,
        peer: str,
        plane: str,
        address: bytes,
        tags: tuple[int, int],
        frames: Channel | None,
    ) -> Wire:
        if plane not in self._planes:
            raise FrameError("plane", f"{plane!r} was renewed while it was chosen")
        if plane in PARCELS:
            tags = frame_tag(tags[0]), frame_tag(tags[1])
        try:
            return UcxWire(self._planes[plane], address, tags, sock, frames)
        except UCXError as error:
            raise PeerLost(peer, f"UCX cannot reach it by {plane}: {error}") from error


def _decode(body: bytes, message: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(body, type=message)
    except msgspec.DecodeError as error:
        raise FrameError("body", f"is no {message.__name__}: {error}") from error
