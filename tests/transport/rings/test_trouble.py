"""Rings between processes: damage, long messages, dials that fail, and turns of channels."""

import asyncio
import ctypes
import gc
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import FrameError, InvalidInput, PeerLost
from moesaic.native.library import lib, library
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.rings.channel import CAPACITY, RingChannel, make_memory
from moesaic.transport.rings.meeting import Meeting, meet
from moesaic.transport.rings.plane import RingPlane
from moesaic.transport.ucx import network as network_module
from moesaic.transport.ucx import wires
from moesaic.transport.ucx.network import UcxNetwork

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

SECRET = b"the cluster secret"
LIMITS = FrameLimits.of_hidden_size(64)
LONG = FrameLimits(max_rows=1, max_cols=1, max_bytes=64 << 20)
COUNTER_BYTES = 64 * 3  # of a ring, in shared memory

Wait = Callable[[Callable[[], bool]], Any]


def network(name: str, limits: FrameLimits = LIMITS) -> UcxNetwork:
    return UcxNetwork(name, "expert", SECRET, limits, transports="ring")


def echo(request: Frame) -> Frame:
    return request.reply(request.tensors)


@pytest.mark.parametrize("damaged", ["dialler's", "listener's"])
async def test_damage_ends_the_link_on_both_sides_at_once(damaged: str, until: Wait) -> None:
    near, far = network("near"), network("far")
    link = await near.connect(await far.listen("127.0.0.1", 0, echo), "far", 5)
    start = ctypes.addressof(link.channel._start)
    written = start + (COUNTER_BYTES if damaged == "dialler's" else 0)
    ctypes.c_uint64.from_address(written).value += 1  # no counter is odd

    for each in (near, far):
        os.eventfd_write(each.bell if each.bell >= 0 else each._rings.bell, 1)
    async with asyncio.timeout(1):  # sooner than by a missing heartbeat
        await until(lambda: not link.alive)
        await far.all_left()

    await near.close()
    await far.close()


async def test_a_dial_that_fails_keeps_no_file_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = network("near"), network("far")
    address = await far.listen("127.0.0.1", 0, echo)

    def refuse(memory: int, side: int, bell: int, *rest: int) -> RingChannel:
        if side == 1:
            os.close(bell)
            raise FrameError("memory", "is no channel's")
        return RingChannel(memory, side, bell, *rest)

    monkeypatch.setattr(wires, "RingChannel", refuse)

    async def fail() -> int:
        with pytest.raises(PeerLost):
            await near.connect(address, "far", 5)
        await asyncio.sleep(0.05)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    first = await fail()

    assert [await fail() for _ in range(3)] == [first] * 3
    await near.close()
    await far.close()


def test_a_channel_that_cannot_be_mapped_keeps_no_file_descriptor(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    bell = os.eventfd(0)
    with (tmp_path / "memory").open("w+b") as file:
        for size in (1, lib().channel_bytes(capacity=CAPACITY)):
            file.truncate(size)
            with pytest.raises(FrameError, match="no channel's"):
                RingChannel(file.fileno(), 0, os.dup(bell), -1, 1)
    os.close(bell)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("answers_by", ["selector", "plain"])
async def test_a_reply_longer_than_the_ring_is_sent_whole_from_a_handler(answers_by: str) -> None:
    # The first network of a loop is looked after while it sleeps, the second is woken as on any loop.
    networks = [network(name, LONG) for name in ("one", "two")]
    far, near = networks if answers_by == "selector" else networks[::-1]
    body = os.urandom(40 << 20)

    async def answer(request: Frame) -> Frame:
        await asyncio.sleep(0.01)
        return request.reply([], body=body)

    address = await far.listen("127.0.0.1", 0, answer)
    link = await near.connect(address, far._worker_id, 5)
    for seq in (1, 2):
        [reply] = await near.exchange([(link, Frame(kind=FrameKind.REQUEST, seq=seq))], 20)

        assert isinstance(reply, Frame)
        assert reply.body == body
    for each in networks:
        await each.close()


@pytest.mark.parametrize("nbytes", [1 << 12, 24 << 20])  # in one piece, and in several
async def test_a_message_beyond_the_limits_ends_the_link(nbytes: int, until: Wait) -> None:
    wide, narrow = network("wide", LONG), network("narrow", FrameLimits(1, 1, 1 << 11))
    link = await wide.connect(await narrow.listen("127.0.0.1", 0, echo), "narrow", 5)
    request = Frame(kind=FrameKind.REQUEST, seq=1, body=bytes(nbytes))

    [outcome] = await wide.exchange([(link, request)], 5)

    assert isinstance(outcome, PeerLost)
    await until(lambda: not narrow.served_peers)
    await wide.close()
    await narrow.close()


async def test_rings_alone_need_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "library", lambda: None)

    with pytest.raises(InvalidInput, match="C compiler"):
        network("alone")


async def test_a_silent_stranger_does_not_keep_the_peer_from_a_meeting() -> None:
    bells = [os.eventfd(0) for _ in range(2)]
    meeting = Meeting(bells[0], b"t" * 32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(meeting.name)

        comes = asyncio.ensure_future(meet(meeting.name, b"t" * 32, bells[1]))
        async with asyncio.timeout(2):
            given = [*await meeting.met(), *await comes]

    meeting.close()
    for each in (*given, *bells):
        os.close(each)


async def test_a_visitor_of_a_meeting_that_was_given_up_is_sent_away() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    bells = [os.eventfd(0) for _ in range(2)]
    meeting = Meeting(bells[0], b"t" * 32)
    for each in await meet(meeting.name, b"t" * 32, bells[1]):
        os.close(each)

    meeting.close()

    await asyncio.sleep(0.01)
    for each in bells:
        os.close(each)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def ends() -> Iterator[Callable[[], tuple[RingChannel, RingChannel]]]:
    """Makes both ends of a channel, in this process; their bells ring for nobody."""
    control = os.eventfd(0)
    made = []

    def make() -> tuple[RingChannel, RingChannel]:
        memory = make_memory()
        pair = [
            RingChannel(memory, side, os.eventfd(0), control, LIMITS.max_bytes) for side in (0, 1)
        ]
        os.close(memory)
        made.extend(pair)
        return pair[0], pair[1]

    yield make
    made.clear()
    os.close(control)


def test_memory_of_a_closed_channel_is_given_back_though_somebody_holds_it() -> None:
    memory, control = make_memory(), os.eventfd(0)
    near, far = (
        RingChannel(memory, side, os.eventfd(0), control, LONG.max_bytes) for side in (0, 1)
    )
    assert near.send(Frame(kind=FrameKind.REQUEST, body=bytes(6 << 20)).encode())
    assert far.receive() is not None
    taken = os.fstat(memory).st_blocks * 512

    near.close()

    assert taken >= 6 << 20
    assert os.fstat(memory).st_blocks * 512 < 1 << 16
    with pytest.raises(FrameError):  # whoever still uses it reads no message
        far.receive()
    os.close(memory)
    os.close(control)


async def test_channels_take_turns_however_many_requests_one_has(
    ends: Callable[[], tuple[RingChannel, RingChannel]],
) -> None:
    ours: list[RingChannel] = []
    pings = network_module._answers_to_pings(LIMITS)
    plane = RingPlane()
    for count in (9, 1):
        near, far = ends()
        for seq in range(count):
            assert near.send(Frame(kind=FrameKind.PING, seq=seq).encode())
        far.answer_by(pings)
        plane.channels[far] = lambda message: None
        ours.append(near)
    plane._changed()
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]

    assert not plane.wait(selector.fileno(), 0)  # one turn

    answered = [Frame.decode(each, LIMITS).seq for near in ours if (each := near.receive())]
    assert answered == [0, 0]
    assert ours[0].receive() is None
    plane.channels.clear()
    plane.close()
    lib().answers_close(answers=pings)
