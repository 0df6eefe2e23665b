"""Tensors that travel apart from their frames, over real UCX."""

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.errors import DeadlineExceeded, InvalidInput, PeerLost
from moesaic.transport.frame import Frame, FrameKind, FrameLimits
from moesaic.transport.tensor_table import CODE_OF_DTYPE
from moesaic.transport.ucx import parcels
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.linked import HANG_S, Deadlines
from tests.transport.parcels.conftest import Carrier, echo, is_free

Open = Callable[..., UcxNetwork]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def request(tensors: list[Tensor], seq: int = 1, num_parcels: int = 1) -> Frame:
    return Frame(
        kind=FrameKind.REQUEST,
        request_id=os.urandom(16),
        seq=seq,
        tensors=tensors,
        parcels=num_parcels,
    )


async def linked(open_one: Open, handler: Any = echo, **far: Any) -> tuple[UcxNetwork, Any]:
    address = await open_one("far", **far).listen("127.0.0.1", 0, handler)
    near = open_one("near")
    return near, await near.connect(address, "far", HANG_S)


@pytest.mark.parametrize("dtype", list(CODE_OF_DTYPE))
async def test_tensors_of_every_dtype_go_and_come_back(open_one: Open, dtype: torch.dtype) -> None:
    near, link = await linked(open_one)
    rows = torch.randint(-100, 100, (300, 257)).to(dtype)
    rest = torch.arange(5).unsqueeze(0)

    [reply] = await near.exchange([(link, request([rows, rest]))], HANG_S)

    assert isinstance(reply, Frame)
    assert reply.parcels == 1
    assert torch.equal(reply.tensors[0], rows)
    assert torch.equal(reply.tensors[1], rest)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (1, 1), (1, 4096), (4096, 1024)])
async def test_tensors_of_any_size_travel_apart(open_one: Open, shape: tuple[int, int]) -> None:
    near, link = await linked(open_one)
    tensors = [torch.randn(shape), torch.empty(0, 8), torch.randn(2, 2)]

    [reply] = await near.exchange([(link, request(tensors, num_parcels=3))], HANG_S)

    assert isinstance(reply, Frame)
    for came, went in zip(reply.tensors, tensors, strict=True):
        assert torch.equal(came, went)


async def test_many_frames_under_way_at_once_keep_their_own_tensors(open_one: Open) -> None:
    async def answer_in_another_order(asked: Frame) -> Frame:
        for _ in range(asked.seq * 7 % 11):
            await asyncio.sleep(0)
        return asked.reply(asked.tensors, parcels=1)

    near, link = await linked(open_one, answer_in_another_order)
    # Some by messages that UCX asks for first, others at once; some whose head is larger than its parcel.
    sizes = [(1, 8), (200, 512), (3, 64), (40, 1024)]
    asked = [
        request([torch.full(sizes[seq % 4], float(seq)), torch.zeros(1 + seq % 3 * 50, 512)], seq)
        for seq in range(60)
    ]

    replies = await near.exchange([(link, frame) for frame in asked], HANG_S)

    for frame, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, Frame)
        assert torch.equal(reply.tensors[0], frame.tensors[0])


async def test_numbers_of_parcels_begin_again(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "NUMBERS", 8)
    near, link = await linked(open_one)
    for seq in range(30):
        rows = torch.full((2, 4), float(seq))

        [reply] = await near.exchange([(link, request([rows], seq))], HANG_S)

        assert isinstance(reply, Frame)
        assert torch.equal(reply.tensors[0], rows)


@pytest.mark.parametrize("near_device", [None, torch.device("cpu")])
async def test_where_one_side_cannot_tensors_travel_within_frames(
    open_one: Open, near_device: Any
) -> None:
    far_device = None if near_device else torch.device("cpu")
    address = await open_one("far", far_device).listen("127.0.0.1", 0, echo)
    near = open_one("near", near_device)
    link: Any = await near.connect(address, "far", HANG_S)
    rows = torch.randn(9, 33)

    [reply] = await near.exchange([(link, request([rows]))], HANG_S)

    assert link.memory is None
    assert isinstance(reply, Frame)
    assert reply.parcels == 0
    assert torch.equal(reply.tensors[0], rows)


@pytest.mark.parametrize("shape", [(65, 8), (8, 65), (64, 64)])
async def test_tensors_beyond_the_bounds_take_no_memory(
    open_one: Open, carriers: list[Carrier], shape: tuple[int, int]
) -> None:
    limits = FrameLimits(max_rows=64, max_cols=64, max_bytes=64 * 64 * 4)  # the header is too much
    near, link = await linked(open_one, limits=limits)
    taken = [each.note_taken() for each in carriers]

    [outcome] = await near.exchange([(link, request([torch.zeros(shape)]))], HANG_S)

    assert isinstance(outcome, PeerLost)
    assert taken == [[], []]


async def test_a_tensor_with_gaps_is_refused_before_anything_is_sent(open_one: Open) -> None:
    near, link = await linked(open_one)

    [outcome] = await near.exchange([(link, request([torch.zeros(4, 8)[:, :4]]))], HANG_S)

    assert isinstance(outcome, InvalidInput)
    assert link.alive


async def test_a_frame_whose_tensors_never_come_ends_the_link_and_gives_memory_back(
    open_one: Open, carriers: list[Carrier], monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(parcels, "PATIENCE_S", 0.3)
    near, link = await linked(open_one)
    far_side, near_side = carriers
    taken = far_side.note_taken()
    near_side.hold_parcels()

    [outcome] = await near.exchange([(link, request([torch.zeros(4, 8)]))], HANG_S)

    assert isinstance(outcome, PeerLost)
    assert len(taken) == 1
    gc.collect()
    await until(lambda: is_free(taken))


async def test_tensors_that_come_after_their_deadline_reach_nobody(
    open_one: Open, carriers: list[Carrier], until: Until, deadlines: Deadlines
) -> None:
    near, link = await linked(open_one)
    far_side, near_side = carriers
    start, held = far_side.sender.start, far_side.hold_parcels()
    taken = near_side.note_taken()
    asking = near.exchange([(link, request([torch.zeros(4, 8)]))], deadlines.SECONDS)
    exchange = asyncio.create_task(asking)
    await until(lambda: len(taken) == 1)  # the frame is here, its tensor is not

    deadlines.expire()
    [outcome] = await exchange

    assert isinstance(outcome, DeadlineExceeded)
    assert not link.alive
    for parcel in held:
        start(*parcel)
    assert len(held) == 1
    address = await open_one("other").listen("127.0.0.1", 0, echo)
    again = await near.connect(address, "other", HANG_S)
    rows = torch.ones(4, 8)
    [reply] = await near.exchange([(again, request([rows]))], HANG_S)
    assert isinstance(reply, Frame)
    assert torch.equal(reply.tensors[0], rows)
    await until(lambda: is_free(taken[:1]))


async def test_tensors_may_come_before_their_frame(
    open_one: Open, carriers: list[Carrier], until: Until
) -> None:
    near, link = await linked(open_one)
    far_side, near_side = carriers
    send, late = near_side.sender.send, list[bytearray]()
    arrived, early = far_side.parcels.arrived, list[Any]()

    def note(found: Any) -> None:
        early.append(found)
        arrived(found)

    near_side.sender.send, far_side.parcels.arrived = late.append, note  # type: ignore[method-assign]
    asking = near.exchange([(link, request([torch.ones(4, 8)]))], HANG_S)
    exchange = asyncio.create_task(asking)
    await until(lambda: len(early) == 1)
    near_side.sender.send = send  # type: ignore[method-assign]

    send(late[0])

    [reply] = await exchange
    assert isinstance(reply, Frame)
    assert torch.equal(reply.tensors[0], torch.ones(4, 8))
