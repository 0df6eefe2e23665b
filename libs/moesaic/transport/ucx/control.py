"""The TCP connection of the handshake: it stays open, and its end means the peer's."""

import asyncio
import socket
from collections.abc import Callable

from moesaic.transport.sockets.keep_alive import keep_alive
from moesaic.transport.wire import NOBODY


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
