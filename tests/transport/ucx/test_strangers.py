"""Who dials a listener without being one of us."""

import asyncio
import os
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from moesaic.errors import DeadlineExceeded, PeerLost
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.ucx import door, handshake
from moesaic.transport.ucx.network import UcxNetwork
from tests.soak.hostile_sockets import Behaviour, hostile_sockets
from tests.transport.linked import HANG_S

Ask = Callable[..., Frame]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
SECRET = b"the cluster secret"
LIMITS = FrameLimits.of_hidden_size(4096)


@pytest.fixture
async def address(echo: Handler, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Of a listener, which gives strangers little time."""
    monkeypatch.setattr(door, "SPEAK_S", 1.5)
    monkeypatch.setattr(door, "HANDSHAKE_S", 1.5)
    network = UcxNetwork("far", "expert", SECRET, LIMITS, transports="socket")
    yield await network.listen("127.0.0.1", 0, echo)
    await network.close()


def num_dropped() -> float:
    return REGISTRY.get_sample_value("moesaic_transport_strangers_dropped_total") or 0.0


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def is_served(address: str, ask: Ask) -> bool:
    network = UcxNetwork("near", "attention", SECRET, LIMITS, transports="socket")
    try:
        link = await network.connect(address, "far", HANG_S)
        (outcome,) = await network.exchange([(link, ask())], HANG_S)
        return isinstance(outcome, Frame)
    finally:
        await network.close()


HUGE = Frame(kind=FrameKind.HELLO, body=bytes(10_000)).encode()
WRONG_ORDER = Frame(kind=FrameKind.PROOF, body=bytes(32)).encode()
NO_INTRODUCTION = Frame(kind=FrameKind.HELLO, body=b"\xc1").encode()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        os.urandom(4096),
        HUGE,
        WRONG_ORDER,
        NO_INTRODUCTION,
        b"",
        b"M",
    ],
    ids=["http", "noise", "huge", "order", "body", "silence", "start"],
)
async def test_a_stranger_is_dropped_and_others_are_served(
    address: str, ask: Ask, noise: bytes
) -> None:
    reader, writer = await opened(address)
    writer.write(noise)

    try:
        said = await reader.read()
    except ConnectionResetError:
        said = b""

    writer.close()
    assert said == b""
    assert await is_served(address, ask)


async def test_a_stranger_costs_little_memory(address: str) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.setblocking(False)
        tracemalloc.start()
        try:
            sock.send(HUGE)
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(sock, 1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert (
        peak < 32_768
    )  # most of it bookkeeping of this test, and none of it for the 10,000 bytes announced


async def test_a_proof_made_without_the_secret_is_refused(address: str) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.setblocking(False)

        with pytest.raises(PeerLost, match="auth failed"):
            await handshake.dial(sock, b"a guess", "near", "attention", "far")


async def assert_refused(
    says: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], cause: str
) -> None:
    """Dial a listener that says this and waits; the link is lost for this cause, and hung up on."""
    gone = asyncio.Event()

    async def listener(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(reader, writer)
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        gone.set()

    network = UcxNetwork("near", "attention", SECRET, LIMITS, transports="socket")
    async with await asyncio.start_server(listener, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(PeerLost, match=cause):
            await network.connect(f"{host}:{port}", "far", HANG_S)
        await gone.wait()
    await network.close()


async def test_a_listener_without_the_secret_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(128)
        challenge = handshake.introduce("far", "expert")
        writer.write(Frame(kind=FrameKind.CHALLENGE, body=challenge).encode())
        writer.write(Frame(kind=FrameKind.WELCOME, body=bytes(32)).encode())

    await assert_refused(impostor, "auth failed")


async def test_a_proof_cannot_be_reflected() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)

    async def mirror() -> None:
        """Send back to the dialler everything it says, under the kind it expects."""
        loop = asyncio.get_running_loop()
        for kind in (FrameKind.CHALLENGE, FrameKind.WELCOME):
            message = await loop.sock_recv(far, 4096)
            body = message[128:]
            await loop.sock_sendall(far, Frame(kind=kind, body=body).encode())

    with near, far:
        _, outcome = await asyncio.gather(
            mirror(), handshake.dial(near, SECRET, "x", "expert", "x"), return_exceptions=True
        )

    assert isinstance(outcome, PeerLost)
    assert "auth failed" in str(outcome)


async def test_both_ends_derive_the_same_session_and_different_tags() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        dialled, accepted = await asyncio.gather(
            handshake.dial(near, SECRET, "near", "attention", "far"),
            handshake.accept(far, SECRET, "far", "expert"),
        )

    assert (dialled.peer, accepted.peer) == ("far", "near")
    assert dialled.key == accepted.key
    assert dialled.tag("dialler") == accepted.tag("dialler") != accepted.tag("listener")


async def test_a_listener_that_is_silent_costs_no_more_than_the_deadline() -> None:
    network = UcxNetwork("near", "attention", SECRET, LIMITS, transports="socket")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        with pytest.raises(DeadlineExceeded):
            await network.connect(address, "far", 0.1)

    await network.close()


async def test_something_else_at_the_address_is_a_lost_peer() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 10)

    await assert_refused(http, "magic")


async def test_beyond_the_cap_the_stranger_who_came_first_makes_room(
    address: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 2)
    monkeypatch.setattr(door, "SPEAK_S", 60.0)
    waiting = [await opened(address) for _ in range(3)]

    assert await waiting[0][0].read() == b""

    assert await is_served(address, ask)
    for _, writer in waiting:
        writer.close()


@pytest.mark.parametrize("behaviour", ["silent", "hello", "dribble"])
async def test_a_crowd_of_strangers_keeps_no_peer_out(
    echo: Handler,
    ask: Ask,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Behaviour,
) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 64)
    network = UcxNetwork("far", "expert", SECRET, LIMITS, transports="socket")
    address = await network.listen("127.0.0.1", 0, echo)
    host, port = address.split(":")
    attack = asyncio.create_task(hostile_sockets(host, int(port), 60.0, 100, (behaviour,)))
    dropped = num_dropped()
    await until(lambda: num_dropped() >= dropped + 100)  # it is crowded

    served = [await is_served(address, ask) for _ in range(5)]

    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)
    await network.close()
    assert served == [True] * 5


async def test_a_hello_without_the_seal_of_the_secret_is_refused() -> None:
    sealed = []
    for secret, error in ((SECRET, ConnectionResetError), (b"a guess", PeerLost), (None, PeerLost)):
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        with near, far:
            body = handshake.introduce("near", "attention", secret)
            near.send(Frame(kind=FrameKind.HELLO, body=body).encode())
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(error):
                await handshake.accept(far, SECRET, "far", "expert", partial(sealed.append, secret))

    assert sealed == [SECRET]


async def test_a_crowd_is_logged_once_a_second(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 1)
    before, began_s = num_dropped(), time.monotonic()
    with capture_logs() as logs:
        waiting = [await opened(address) for _ in range(20)]
        for reader, _ in waiting:
            await reader.read()

    for _, writer in waiting:
        writer.close()
    assert num_dropped() == before + 20
    told = [line for line in logs if line["event"] == "stranger.dropped"]
    assert 1 <= len(told) <= 1 + time.monotonic() - began_s
