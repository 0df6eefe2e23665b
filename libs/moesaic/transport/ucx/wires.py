"""Wires between processes: each is a carrier of messages, and the connection that tells when the peer is gone."""

import asyncio
import os
import socket

from moesaic.transport.frame import Message
from moesaic.transport.rings.channel import Channel, RingChannel
from moesaic.transport.rings.plane import RingPlane
from moesaic.transport.sockets.channel import SocketChannel
from moesaic.transport.sockets.control import Control
from moesaic.transport.sockets.wire import SocketWire
from moesaic.transport.ucx.bindings import UcxWorker
from moesaic.transport.ucx.parcels import UcxParcels
from moesaic.transport.wire import NOBODY, Parcels, Receiver, Wire


class UcxWire:
    """A ``Wire``: a UCX endpoint, and the connection that tells when the peer is gone."""

    receiver: Receiver

    def __init__(
        self,
        plane: UcxWorker,
        address: bytes,
        tags: tuple[int, int],
        sock: socket.socket,
        frames: Channel | None = None,
    ) -> None:
        """Connect to the worker at ``address``; ``sock`` is the connection of the handshake.

        Raises:
            UCXError: see ``UcxWorker.connect``.
        """
        self._endpoint = plane.connect(
            address, tags, self._arrive, self._lost, sock.fileno(), frames
        )
        self._control = Control(sock, self._lost)

    @property
    def channel(self) -> Channel | None:
        """See ``Wire.channel``."""
        return self._endpoint.channel

    @property
    def parcels(self) -> UcxParcels | None:
        """See ``Wire.parcels``."""
        return self._endpoint.parcels

    def send(self, message: Message) -> None:
        """See ``Wire.send``."""
        self._endpoint.send(message)

    def close(self) -> None:
        """See ``Wire.close``."""
        self._endpoint.close()
        self._control.close()
        self.receiver = NOBODY

    def _arrive(self, message: Message) -> None:
        self.receiver.on_message(message)

    def _lost(self, cause: str) -> None:
        receiver = self.receiver
        self.close()
        receiver.on_lost(cause)


class ChannelWire:
    """A ``Wire``: a channel without UCX, and the connection that tells when the peer is gone."""

    parcels: Parcels | None = None
    receiver: Receiver

    def __init__(self, rings: RingPlane, channel: Channel, sock: socket.socket) -> None:
        """Take over ``sock``, the connection of the handshake, which may be what carries ``channel``."""
        self.channel: Channel | None = channel
        self._carrier, self._rings, self._open = channel, rings, True
        carries = isinstance(channel, SocketChannel)
        self._control = Control(sock, None if carries else self._lost)
        rings.add(channel, self._arrive, self._lost)

    def send(self, message: Message) -> None:
        """See ``Wire.send``."""
        if not self._carrier.closed and not self._carrier.send(message):
            asyncio.get_running_loop().call_soon(self._lost, "the channel is damaged")

    def close(self) -> None:
        """See ``Wire.close``."""
        self._open = False
        self._rings.remove(self._carrier)
        self._control.close()
        self.receiver = NOBODY

    def _arrive(self, message: Message) -> None:
        self.receiver.on_message(message)

    def _lost(self, cause: str) -> None:
        # Not `closed`: a broken one is closed before anybody hears of it.
        if self._open:
            receiver = self.receiver
            self.close()
            receiver.on_lost(cause)


def ring_channel(
    memory: int, bell: int, side: int, sock: socket.socket, max_bytes: int
) -> RingChannel:
    """Make a channel of shared memory; it takes over ``memory`` and ``bell``, see ``RingChannel``.

    Raises:
        FrameError: the memory is no channel's.
    """
    try:
        return RingChannel(memory, side, bell, sock.fileno(), max_bytes)
    finally:
        os.close(memory)


def socket_wire(rings: RingPlane | None, sock: socket.socket, max_bytes: int) -> Wire:
    """Make a wire of the connection itself; ``rings`` are of a machine with C functions."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if rings is None:
        return SocketWire(sock, max_bytes)
    return ChannelWire(rings, SocketChannel(sock, max_bytes, rings.look), sock)
