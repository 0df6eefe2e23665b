"""Sockets that know no secret and want the places of those who do."""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal

from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx import handshake

Behaviour = Literal["silent", "hello", "dribble"]
MAX_SOCKETS = 2000  # at a time
MAX_SECONDS = 600.0


async def hostile_sockets(
    host: str,
    port: int,
    seconds: float,
    num_sockets: int = 100,
    behaviours: tuple[Behaviour, ...] = ("silent", "hello", "dribble"),
) -> Counter[str]:
    """Keep ``num_sockets`` connections to a listener open, each opened again as soon as it is closed.

    Args:
        host: address of the listener.
        port: its port.
        seconds: how long, at most 600.
        num_sockets: at a time, at most 2,000; they take the behaviours in turn.
        behaviours: "silent" says nothing, "hello" introduces itself and proves nothing, "dribble" sends
            a good HELLO a byte at a time.

    Returns:
        How often each behaviour was connected, and under "refused" how often it could not.
    """
    opened: Counter[str] = Counter()
    attackers = [
        asyncio.create_task(_keep_coming((host, port), behaviours[i % len(behaviours)], opened))
        for i in range(min(num_sockets, MAX_SOCKETS))
    ]
    try:
        await asyncio.sleep(min(seconds, MAX_SECONDS))
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
    return opened


async def _keep_coming(where: tuple[str, int], behaviour: Behaviour, opened: Counter[str]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET) as sock:
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, where)
                opened[behaviour] += 1
                await _BEHAVIOURS[behaviour](sock)
                while await loop.sock_recv(sock, 4096):
                    pass
            except ConnectionError:
                opened["refused"] += 1
            except OSError:  # no local port is left
                await asyncio.sleep(0.1)


async def _say_nothing(sock: socket.socket) -> None:
    """Leave everything to the other end."""


async def _say_hello(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _hello())


async def _dribble(sock: socket.socket) -> None:
    for byte in _hello():
        await asyncio.get_running_loop().sock_sendall(sock, bytes([byte]))
        await asyncio.sleep(0.02)


def _hello() -> bytes:
    body = handshake.introduce("attention-0", "attention", b"a guess")
    return bytes(Frame(kind=FrameKind.HELLO, body=body).encode())


_BEHAVIOURS: dict[Behaviour, Callable[[socket.socket], Awaitable[None]]] = {
    "silent": _say_nothing,
    "hello": _say_hello,
    "dribble": _dribble,
}
