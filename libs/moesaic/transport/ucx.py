"""The network between processes: authenticated over TCP, then UCX for everything else.

A listener is a plain TCP socket. Only peers that have proved the cluster secret learn a UCX address, and the tag of their
messages is drawn from the session key, so UCX carries nothing for strangers. Each process has one UCX worker per plane:
shared memory for peers on its host, the network for the others.
"""

import asyncio
import hashlib
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from moesaic.errors import DeadlineExceeded, FrameError, InvalidInput, MoesaicError, Overloaded, PeerLost
from moesaic.transport import handshake
from moesaic.transport.bindings import UcxEndpoint, UCXError, UcxWorker
from moesaic.transport.contract import Handler, Link
from moesaic.transport.control import Control
from moesaic.transport.frame import Frame, FrameKind, FrameLimits, Message
from moesaic.transport.handshake import Session
from moesaic.transport.links import Links
from moesaic.transport.wire import Receiver

log = structlog.get_logger()

Transports = Literal["auto", "tcp", "shm"]

HANDSHAKE_S = 2.0  # for a stranger to prove itself
MAX_STRANGERS = 64  # at the same time
MAX_LINKS = 4096

_SHM, _NET = "shm", "net"  # planes, best first


class _Offer(msgspec.Struct, frozen=True):
    """How the dialler can be reached: its UCX address on each plane, and which host's memory it can share."""

    host: str
    addresses: dict[str, bytes]


class _Choice(msgspec.Struct, frozen=True):
    """The plane that the listener has chosen, and its UCX address there."""

    plane: str
    address: bytes


class UcxNetwork:
    """A ``Network`` over UCX."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        secret: bytes,
        limits: FrameLimits,
        transports: Transports = "auto",
    ) -> None:
        """Open the transports; call it on the event loop that will own the network.

        Args:
            worker_id: who we are to our peers.
            role: what we are, such as "expert".
            secret: the cluster secret.
            limits: the largest frames to believe.
            transports: "auto" uses shared memory on this host and what UCX finds best elsewhere; "tcp" and "shm" only that.

        Raises:
            InvalidInput: this machine does not offer the transports.
        """
        self._worker_id, self._role, self._secret = worker_id, role, secret
        self._links = Links(limits)
        self._planes = _open_planes(transports, limits.max_bytes)
        self._listeners: list[asyncio.Task[None]] = []
        self._strangers: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, handler: Handler) -> str:
        """See ``Network.listen``."""
        try:
            sock = socket.create_server((host, port), backlog=MAX_STRANGERS)
        except OSError as error:
            raise InvalidInput("address", f"cannot listen on {host}:{port}: {error.strerror}") from error
        sock.setblocking(False)
        bound = sock.getsockname()
        self._listeners.append(asyncio.create_task(self._accept(sock, handler)))
        return f"{bound[0]}:{bound[1]}"
