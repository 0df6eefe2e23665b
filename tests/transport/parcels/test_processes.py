"""Tensors that travel apart, between real processes, of which one dies."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moesaic.errors import PeerLost
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx.network import UcxNetwork

Open = Callable[..., UcxNetwork]
Start = Callable[[str], Any]


def request(rows: torch.Tensor, seq: int = 1, flags: int = 0) -> Frame:
    return Frame(
        kind=FrameKind.REQUEST,
        request_id=os.urandom(16),
        seq=seq,
        flags=flags,
        tensors=[rows],
        parcels=1,
    )


async def test_processes_exchange_tensors_apart(
    open_one: Open, transports: str, far_worker: Start
) -> None:
    near = open_one("near")
    link: Any = await near.connect(far_worker(f"{transports}/cpu").address, "far", 10.0)
    asked = [request(torch.randn(rows, 4096), seq) for seq, rows in enumerate((1, 16, 2048))]

    replies = await near.exchange([(link, frame) for frame in asked], 30.0)

    assert link.memory is not None
    for frame, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, Frame)
        assert torch.equal(reply.tensors[0], frame.tensors[0])


async def test_a_process_that_knows_no_parcels_is_sent_whole_frames(
    open_one: Open, transports: str, far_worker: Start
) -> None:
    near = open_one("near")
    link: Any = await near.connect(far_worker(transports).address, "far", 10.0)
    rows = torch.randn(7, 4096)

    [reply] = await near.exchange([(link, request(rows))], 30.0)

    assert link.memory is None
    assert isinstance(reply, Frame)
    assert torch.equal(reply.tensors[0], rows)


@pytest.mark.parametrize("rows", [1, 4096])
async def test_a_peer_that_dies_with_tensors_under_way_is_lost_and_others_are_served(
    open_one: Open, transports: str, far_worker: Start, rows: int
) -> None:
    near = open_one("near")
    far = far_worker(f"{transports}/cpu")
    link: Any = await near.connect(far.address, "far", 10.0)
    far.signal(signal.SIGSTOP)  # so that nothing of the tensors is taken
    asked = [request(torch.zeros(rows, 4096), seq) for seq in range(3)]
    exchange = asyncio.create_task(near.exchange([(link, each) for each in asked], 60.0))
    await asyncio.sleep(0.05)

    far.signal(signal.SIGKILL)

    assert all(isinstance(outcome, PeerLost) for outcome in await exchange)
    assert not link._wire.parcels._waiting
    again = await near.connect(far_worker(f"{transports}/cpu").address, "far", 10.0)
    sent = torch.randn(64, 4096)
    [reply] = await near.exchange([(again, request(sent))], 30.0)
    assert isinstance(reply, Frame)
    assert torch.equal(reply.tensors[0], sent)


async def test_a_peer_that_dies_between_a_frame_and_its_tensors_is_lost(
    open_one: Open, transports: str, far_worker: Start
) -> None:
    near = open_one("near")
    far = far_worker(f"{transports}/cpu")
    link: Any = await near.connect(far.address, "far", 10.0)
    carrier = link._wire.parcels
    arrived = asyncio.Event()
    carrier.arrived = lambda found: arrived.set()  # as if it had not come
    exchange = asyncio.create_task(near.exchange([(link, request(torch.ones(4, 8)))], 60.0))
    await arrived.wait()

    far.signal(signal.SIGKILL)

    [outcome] = await exchange
    assert isinstance(outcome, PeerLost)
    assert not carrier._waiting
    assert not carrier._wanted
