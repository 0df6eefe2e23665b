"""A channel over the connection of the handshake, as Python sees it."""

import asyncio
import socket
from collections.abc import Callable

from moesaic.native.library import lib
from moesaic.transport.rings.channel import Channel


class SocketChannel(Channel):
    """A channel over a connected socket, which stays the caller's. Lives on the running event loop."""

    def __init__(self, sock: socket.socket, max_bytes: int, look: Callable[[], None]) -> None:
        """Open it; ``look`` is called while there is something to read, or room for what waits.

        A message of more than ``max_bytes`` breaks the channel.

        Raises:
            MemoryError: there is none.
        """
        super().__init__(lib().channel_open_stream(socket=sock.fileno(), most=max_bytes))
        self.descriptor = lib().channel_descriptor(channel=self.c)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.descriptor, look)

    def close(self) -> None:
        """See ``Channel.close``."""
        if not self.closed:
            self._loop.remove_reader(self.descriptor)
        super().close()

    def _cause(self) -> str:
        if lib().channel_excess(channel=self.c):
            return super()._cause()
        return cause_of_end(self._sock)


def cause_of_end(sock: socket.socket) -> str:
    """Say why a connection carries no more."""
    try:
        if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
            return "the peer closed the connection"
    except BlockingIOError:
        pass
    except OSError as error:
        return f"the connection broke: {error.strerror}"
    return "the peer broke the protocol"
