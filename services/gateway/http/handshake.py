"""Connections of HTTPS from their first byte on: handshakes are bounded in time, and count as connections."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import structlog

from moesaic.services.gateway.http.certificates import Certificates
from moesaic.services.gateway.http.protocol import Connections

HANDSHAKE_S = 10.0
PAUSE_S = 0.1  # when the system gives no connection, as without file descriptors
log = structlog.get_logger()


class Handshake:
    """One connection up to the end of its handshake."""

    def __init__(self, connections: Connections) -> None:
        """Count it among ``connections``; the task that makes it is the handshake."""
        task = asyncio.current_task()
        assert task is not None
        self._connections, self._task = connections, task
        connections.begin(self)

    def abort(self) -> None:
        """Hang up."""
        self.end()
        self._task.cancel()

    def end(self) -> None:
        """Count it no more."""
        self._connections.end(self)


async def accept(
    listener: socket.socket,
    certificates: Certificates,
    connections: Connections,
    make: Callable[[], asyncio.Protocol],
) -> None:
    """Accept connections and shake hands, until cancelled; then no handshake goes on.

    Args:
        listener: listens already.
        certificates: of the server.
        connections: of the server.
        make: makes the protocol of an open connection.
    """
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    shaking: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("http.not_accepted", cause=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            task = loop.create_task(_shake(accepted, certificates, connections, make))
            shaking.add(task)
            task.add_done_callback(shaking.discard)
    finally:
        for each in shaking:
            each.cancel()


async def _shake(
    accepted: socket.socket,
    certificates: Certificates,
    connections: Connections,
    make: Callable[[], asyncio.Protocol],
) -> None:
    handshake, loop = Handshake(connections), asyncio.get_running_loop()
    # The client speaks no TLS, left, was too slow, or had to make room for others.
    with suppress(OSError, asyncio.CancelledError):
        await loop.connect_accepted_socket(
            make, accepted, ssl=certificates.context, ssl_handshake_timeout=HANDSHAKE_S
        )
    handshake.end()
