"""The TCP connection of the handshake: it stays open, and its end means the peer's."""

import asyncio
import socket
from collections.abc import Callable

from moesaic.transport.wire import NOBODY

_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
)  # s, s, probes


class Control:
    """Watcher of a connection that carries no more data.

    It reports a peer's death at once, for every transport of tensors; shared memory alone never would.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[str], None]) -> None:
        self._sock, self._on_lost = sock, on_lost
        self._loop = asyncio.get_running_loop()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
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
