"""Messages over a connection, whole and in pieces, by C and by Python."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.transport.rings.plane import RingPlane, new_event_loop
from moesaic.transport.ucx.wires import socket_wire
from moesaic.transport.wire import Wire

MOST = 1 << 20
BY_C, BY_PYTHON = True, False


class Heard:
    """What a wire has told."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.causes: list[str] = []
        self.news = asyncio.Event()

    def on_message(self, message: Any) -> None:
        self.messages.append(bytes(message))
        self.news.set()

    def on_lost(self, cause: str) -> None:
        self.causes.append(cause)
        self.news.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            await self.news.wait()
            self.news.clear()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


def record(message: bytes, size: int | None = None) -> bytes:
    head = (len(message) if size is None else size).to_bytes(8, "little", signed=True)
    return head + bytes(56) + message + bytes(-len(message) % 64)


@pytest.fixture(params=[BY_C, BY_PYTHON], ids=["c", "python"])
def by_c(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def opened(sock: socket.socket, rings: RingPlane | None) -> tuple[Wire, Heard]:
    wire, heard = socket_wire(rings, sock, MOST), Heard()
    wire.receiver = heard
    return wire, heard


async def with_raw_peer(by_c: bool, act: Callable[[socket.socket, Heard], Awaitable[None]]) -> None:
    near, far = connected()
    rings = RingPlane() if by_c else None
    wire, heard = opened(near, rings)
    try:
        await act(far, heard)
    finally:
        far.close()
        wire.close()
        if rings is not None:
            rings.close()


@pytest.mark.parametrize("by_c", [BY_C, BY_PYTHON])
@given(
    messages=st.lists(st.integers(1, 700).map(lambda n: bytes([n % 251]) * n), max_size=6),
    cuts=st.lists(st.integers(1, 500), min_size=1, max_size=8),
)
def test_messages_arrive_whole_however_the_stream_is_cut(
    by_c: bool, messages: list[bytes], cuts: list[int]
) -> None:
    async def act(far: socket.socket, heard: Heard) -> None:
        stream = b"".join(map(record, messages))
        at, step = 0, 0
        while at < len(stream):
            piece = stream[at : at + cuts[step % len(cuts)]]
            await asyncio.get_running_loop().sock_sendall(far, piece)
            at, step = at + len(piece), step + 1
        await heard.until(lambda: len(heard.messages) == len(messages))
        assert heard.messages == messages

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(with_raw_peer(by_c, act))


@pytest.mark.parametrize("size", [0, -1, -(1 << 63), MOST + 1, (1 << 63) - 1])
async def test_a_size_without_sense_ends_the_connection(by_c: bool, size: int) -> None:
    async def act(far: socket.socket, heard: Heard) -> None:
        far.send(record(b"first") + record(b"x", size) + record(b"after"))
        await heard.until(lambda: bool(heard.causes))
        assert heard.messages == [b"first"]
        assert len(heard.causes) == 1

    await with_raw_peer(by_c, act)


async def test_what_came_before_the_end_is_heard(by_c: bool) -> None:
    async def act(far: socket.socket, heard: Heard) -> None:
        far.send(record(b"first") + record(b"second") + record(b"cut")[:70])
        far.close()
        await heard.until(lambda: bool(heard.causes))
        assert heard.messages == [b"first", b"second"]
        assert heard.causes == ["the peer closed the connection"]

    await with_raw_peer(by_c, act)


async def test_messages_wait_for_a_peer_that_reads_late(by_c: bool) -> None:
    near, far = connected()
    rings = RingPlane() if by_c else None
    wire, heard = opened(near, rings)
    messages = [bytes([n]) * (MOST - n) for n in range(24)]  # more than the system holds
    for message in messages:
        wire.send(bytearray(message))

    received = b""
    wanted = b"".join(map(record, messages))
    while len(received) < len(wanted):
        received += await asyncio.get_running_loop().sock_recv(far, MOST)

    assert received == wanted
    assert not heard.causes
    wire.close()
    far.close()
    if rings is not None:
        rings.close()
