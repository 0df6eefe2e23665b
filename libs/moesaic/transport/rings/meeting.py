"""The meeting of two processes of one host, at which each gives the other file descriptors.

The dialler opens a socket under a random name, which the handshake tells its peer alone; the peer
comes with a token of their session. Names live in the network's namespace: a peer in another one does
not come, and the next plane is taken.
"""

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Iterable

from moesaic.errors import FrameError
from moesaic.transport.rings.channel import make_memory

_TOKEN_BYTES = 32
_SPEAK_S = 0.2  # for a visitor to say its token: peers do at once


class Meeting:
    """The dialler's side of one meeting, on the running event loop."""

    def __init__(self, bell: int, token: bytes) -> None:
        """Open the place for the peer with ``token``; ``bell`` is this process's."""
        self._bell, self._token, self._taken = bell, token, False
        self.name = b"\0moesaic-" + secrets.token_hex(16).encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(self.name)
        self._listener.listen(4)
        self._peer = asyncio.ensure_future(self._meet())

    async def met(self) -> tuple[int, int]:
        """Wait for the peer.

        Returns:
            File descriptors: memory for the channel, and the peer's bell.
        """
        found = await self._peer
        self._taken = True
        return found

    def close(self) -> None:
        """Close the place. A peer that came, and that nobody awaits, is sent away."""
        self._listener.close()
        if not self._taken:
            self._peer.cancel()
            self._peer.add_done_callback(_send_away)

    async def _meet(self) -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        while True:
            visitor, _ = await loop.sock_accept(self._listener)
            with visitor:
                visitor.setblocking(False)
                try:
                    async with asyncio.timeout(_SPEAK_S):
                        said, bells = await _receive(visitor)
                except TimeoutError:
                    # A stranger
                    continue
                if len(bells) != 1 or not hmac.compare_digest(said, self._token):
                    _close(bells)
                    continue
                memory = make_memory()
                try:
                    socket.send_fds(visitor, [b"."], [memory, self._bell])
                except OSError:
                    _close([memory, *bells])
                    raise
                return memory, bells[0]


async def meet(name: bytes, token: bytes, bell: int) -> tuple[int, int]:
    """Come to a dialler's meeting, as the listener.

    Returns:
        File descriptors: memory for the channel, and the dialler's bell.

    Raises:
        OSError: there is no such place here.
        FrameError: the dialler gives something else.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, name)
        socket.send_fds(sock, [token], [bell])
        _, given = await _receive(sock)
        if len(given) != 2:
            _close(given)
            raise FrameError("meeting", f"gave {len(given)} file descriptors, not 2")
        return given[0], given[1]


async def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    await _readable(sock)
    message, given, _, _ = socket.recv_fds(sock, _TOKEN_BYTES, 2)
    for each in given:
        os.set_inheritable(each, False)
    return message, given


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _wake, came)
    try:
        await came
    finally:
        loop.remove_reader(sock)


def _wake(sleeper: "asyncio.Future[None]") -> None:
    if not sleeper.done():
        sleeper.set_result(None)


def _send_away(peer: "asyncio.Future[tuple[int, int]]") -> None:
    if not peer.cancelled() and peer.exception() is None:
        _close(peer.result())


def _close(given: Iterable[int]) -> None:
    for each in given:
        os.close(each)
