"""The TCP connection of the handshake: it stays open, and its end means the peer's."""

import asyncio
import socket
from collections.abc import Callable

from moesaic.transport.wire import NOBODY

# Seconds, seconds, probes, and milliseconds that what was sent may stay unacknowledged: the system
# probes no connection that waits for an acknowledgement.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


def keep_alive(sock: socket.socket) -> None:
    """Have the system find out that the peer's machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Control:
    """Watcher of the connection of the handshake.

    It reports a peer's death at once, for every transport of tensors; shared memory alone never would.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[str], None] | None) -> None:
        """Take over ``sock``; without ``on_lost`` whoever reads from it sees its end."""
        self._sock, self._on_lost = sock, on_lost or NOBODY.on_lost
        self._loop = asyncio.get_running_loop()
        keep_alive(sock)
        if on_lost is not None:
            self._loop.add_reader(sock, self._ended)

    def close(self) -> None:
        """Close the connection; calling it again changes nothing."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            # What it belongs to is freed at once, not when garbage is looked for.
            self._on_lost = NOBODY.on_lost

    def _ended(self) -> None:
        cause = "the peer closed the connection"
        try:
            if self._sock.recv(1):
                cause = "the peer broke the protocol"
        except BlockingIOError:
            return
        except OSError as error:
            cause = f"the connection broke: {error.strerror}"
        on_lost = self._on_lost
        self.close()
        on_lost(cause)
