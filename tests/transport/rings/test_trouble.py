"""Rings between processes: damage, long messages, dials that fail, and turns of channels."""

import asyncio
import gc
import mmap
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import FrameError, InvalidInput, PeerLost
from moesaic.native.library import lib, library
from moesaic.transport import pulse
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.rings.channel import (
    CAPACITY,
    RingChannel,
    answers_to_pings,
    make_memory,
)
from moesaic.transport.rings.meeting import Meeting, meet
from moesaic.transport.rings.plane import RingPlane
from moesaic.transport.ucx import network as network_module
from moesaic.transport.ucx import wires
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.linked import HANG_S

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


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Of each side of each channel that networks open: its memory, and the bell of the other side."""
    made: list[tuple[int, int]] = []

    def note(memory: int, side: int, bell: int, *rest: int) -> RingChannel:
        made.append((os.dup(memory), os.dup(bell)))
        return RingChannel(memory, side, bell, *rest)

    monkeypatch.setattr(wires, "RingChannel", note)
    yield made
    for descriptor in (each for pair in made for each in pair):
        os.close(descriptor)


@pytest.mark.parametrize("damaged", ["dialler's", "listener's"])
async def test_damage_ends_the_link_on_both_sides_at_once(
    damaged: str, until: Wait, channels: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "EJECT_S", 3600.0)  # no missing heartbeat ends it
    near, far = network("near"), network("far")
    link = await near.connect(await far.listen("127.0.0.1", 0, echo), "far", HANG_S)
    with mmap.mmap(channels[0][0], 0) as memory:
        memory[COUNTER_BYTES if damaged == "dialler's" else 0] += 1  # no counter is odd

    for _, bell in channels:
        os.eventfd_write(bell, 1)
    await until(lambda: not link.alive)
    await far.all_left()

    await near.close()
    await far.close()


async def test_a_dial_that_fails_keeps_no_file_descriptor(
    monkeypatch: pytest.MonkeyPatch, until: Wait
) -> None:
    near, far = network("near"), network("far")
    address = await far.listen("127.0.0.1", 0, echo)

    def refuse(memory: int, side: int, bell: int, *rest: int) -> RingChannel:
        if side == 1:
            os.close(bell)
            raise FrameError("memory", "is no channel's")
        return RingChannel(memory, side, bell, *rest)

    monkeypatch.setattr(wires, "RingChannel", refuse)

    async def fail() -> None:
        with pytest.raises(PeerLost):
            await near.connect(address, "far", HANG_S)

    await fail()
    first = num_descriptors()
    for _ in range(5):  # what the first one had still to close, is less than what these would keep
        await fail()
        await until(lambda: num_descriptors() <= first)

    await near.close()
    await far.close()


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_channel_that_cannot_be_mapped_keeps_no_file_descriptor(tmp_path: Path) -> None:
    before = num_descriptors()
    bell = os.eventfd(0)
    with (tmp_path / "memory").open("w+b") as file:
        for size in (1, lib().channel_bytes(capacity=CAPACITY)):
            file.truncate(size)
            with pytest.raises(FrameError, match="not a channel"):
                RingChannel(file.fileno(), 0, os.dup(bell), -1, 1)
    os.close(bell)
    assert num_descriptors() == before


@pytest.mark.parametrize("answers_by", ["selector", "plain"])
async def test_a_reply_longer_than_the_ring_is_sent_whole_from_a_handler(answers_by: str) -> None:
    # The first network of a loop is looked after while it sleeps, the second is woken as on any loop.
    networks = {name: network(name, LONG) for name in ("one", "two")}
    name, other = ("one", "two") if answers_by == "selector" else ("two", "one")
    far, near = networks[name], networks[other]
    body = os.urandom(40 << 20)

    async def answer(request: Frame) -> Frame:
        await asyncio.sleep(0.01)  # so the loop sleeps before
        return request.reply([], body=body)

    address = await far.listen("127.0.0.1", 0, answer)
    link = await near.connect(address, name, HANG_S)
    for seq in (1, 2):
        [reply] = await near.exchange([(link, Frame(kind=FrameKind.REQUEST, seq=seq))], HANG_S)

        assert isinstance(reply, Frame)
        assert reply.body == body
    for each in networks.values():
        await each.close()


@pytest.mark.parametrize("nbytes", [1 << 12, 24 << 20])  # in one piece, and in several
async def test_a_message_beyond_the_limits_ends_the_link(nbytes: int, until: Wait) -> None:
    wide, narrow = network("wide", LONG), network("narrow", FrameLimits(1, 1, 1 << 11))
    link = await wide.connect(await narrow.listen("127.0.0.1", 0, echo), "narrow", HANG_S)
    request = Frame(kind=FrameKind.REQUEST, seq=1, body=bytes(nbytes))

    [outcome] = await wide.exchange([(link, request)], HANG_S)

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
        given = [*await meeting.met(), *await comes]

    meeting.close()
    for each in (*given, *bells):
        os.close(each)


async def test_a_visitor_of_a_meeting_that_was_given_up_is_sent_away(until: Wait) -> None:
    before = num_descriptors()
    bells = [os.eventfd(0) for _ in range(2)]
    meeting = Meeting(bells[0], b"t" * 32)
    for each in await meet(meeting.name, b"t" * 32, bells[1]):
        os.close(each)

    meeting.close()

    for each in bells:
        os.close(each)
    await until(lambda: num_descriptors() == before)


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
    pings = answers_to_pings(LIMITS)
    plane = RingPlane()
    for count in (9, 1):
        near, far = ends()
        for seq in range(count):
            assert near.send(Frame(kind=FrameKind.PING, seq=seq).encode())
        far.answer_by(pings)
        plane.add(far, lambda message: None, pytest.fail)
        ours.append(near)
    with select.epoll() as nothing:
        assert not plane.wait(nothing.fileno(), 0)  # one turn

    answered = [Frame.decode(each, LIMITS).seq for near in ours if (each := near.receive())]
    assert answered == [0, 0]
    assert ours[0].receive() is None
    plane.close()
    lib().answers_close(answers=pings)
