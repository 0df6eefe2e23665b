"""Wires between processes: each is a carrier of messages, and the connection that tells when the peer is gone."""

import asyncio
import os
import socket

from moesaic.transport.frame import Message
from moesaic.transport.rings.channel import Channel, RingChannel
from moesaic.transport.rings.plane import RingPlane
from moesaic.transport.ucx.bindings import UcxWorker
from moesaic.transport.ucx.control import Control
from moesaic.transport.ucx.parcels import UcxParcels
from moesaic.transport.wire import NOBODY, Receiver


class UcxWire:
    """A ``Wire``: a UCX endpoint, and the connection that tells when the peer is gone."""

    receiver: Receiver

    def __init__(
        self, plane: UcxWorker, address: bytes, tags: tuple[int, int], sock: socket.socket
    ) -> None:
        """Connect to the worker at ``address``; ``sock`` is the connection of the handshake.

        Raises:
            UCXError: see ``UcxWorker.connect``.
        """
        self._endpoint = plane.connect(address, tags, self._arrive, self._lost, sock.fileno())
        self._control = Control(sock, self._lost)

    @property
    def channel(self) -> Channel | None:
        """The channel that carries it, if C functions do."""
        return self._endpoint.channel

    @property
    def parcels(self) -> UcxParcels | None:
        """The part of it that carries tensors apart from their frames, if there is one."""
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


class RingWire:
    """A ``Wire``: a channel in shared memory, and the connection that tells when the peer is gone."""

    receiver: Receiver

    def __init__(
        self,
        rings: RingPlane,
        memory: int,
        bell: int,
        side: int,
        sock: socket.socket,
        max_bytes: int,
    ) -> None:
        """Take over ``memory`` and the other side's ``bell``; see ``RingChannel``.

        Raises:
            FrameError: the memory is no channel's.
        """
        try:
            self.channel = RingChannel(memory, side, bell, sock.fileno(), max_bytes)
        finally:
            os.close(memory)
        self._rings, self._open = rings, True
        self._control = Control(sock, self._lost)
        rings.add(self.channel, self._arrive, self._lost)

    def send(self, message: Message) -> None:
        """See ``Wire.send``."""
        if not self.channel.closed and not self.channel.send(message):
            asyncio.get_running_loop().call_soon(self._lost, "the channel is damaged")

    def close(self) -> None:
        """See ``Wire.close``."""
        self._open = False
        self._rings.remove(self.channel)
        self._control.close()
        self.receiver = NOBODY

    def _arrive(self, message: Message) -> None:
        self.receiver.on_message(message)

    def _lost(self, cause: str) -> None:
        # Not `channel.closed`: a broken one is closed before anybody hears of it.
        if self._open:
            receiver = self.receiver
            self.close()
            receiver.on_lost(cause)
