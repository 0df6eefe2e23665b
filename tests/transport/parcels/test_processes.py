"""Tensors that travel apart, between real processes, of which one dies."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moesaic.errors import PeerLost
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.linked import HANG_S
from tests.transport.parcels.conftest import Carrier, is_free

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
    link: Any = await near.connect(far_worker(f"{transports}/cpu").address, "far", HANG_S)
    asked = [request(torch.randn(rows, 4096), seq) for seq, rows in enumerate((1, 16, 2048))]

    replies = await near.exchange([(link, frame) for frame in asked], HANG_S)

    assert link.memory is not None
    for frame, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, Frame)
        assert torch.equal(reply.tensors[0], frame.tensors[0])


async def test_a_process_that_knows_no_parcels_is_sent_whole_frames(
    open_one: Open, transports: str, far_worker: Start
) -> None:
    near = open_one("near")
    link: Any = await near.connect(far_worker(transports).address, "far", HANG_S)
    rows = torch.randn(7, 4096)

    [reply] = await near.exchange([(link, request(rows))], HANG_S)

    assert link.memory is None
    assert isinstance(reply, Frame)
    assert torch.equal(reply.tensors[0], rows)


@pytest.mark.parametrize("rows", [1, 4096])
async def test_a_peer_that_dies_with_tensors_under_way_is_lost_and_others_are_served(
    open_one: Open,
    transports: str,
    far_worker: Start,
    carriers: list[Carrier],
    rows: int,
) -> None:
    near = open_one("near")
    far = far_worker(f"{transports}/cpu")
    link: Any = await near.connect(far.address, "far", HANG_S)
    taken = carriers[0].note_taken()
    far.signal(signal.SIGSTOP)  # so that nothing of the tensors is taken
    asked = [request(torch.zeros(rows, 4096), seq) for seq in range(3)]
    exchange = asyncio.create_task(near.exchange([(link, each) for each in asked], HANG_S))
    for _ in range(10):  # turns in which the tensors leave
        await asyncio.sleep(0)

    far.signal(signal.SIGKILL)

    assert all(isinstance(outcome, PeerLost) for outcome in await exchange)
    assert is_free(taken)
    again = await near.connect(far_worker(f"{transports}/cpu").address, "far", HANG_S)
    sent = torch.randn(64, 4096)
    [reply] = await near.exchange([(again, request(sent))], HANG_S)
    assert isinstance(reply, Frame)
    assert torch.equal(reply.tensors[0], sent)


async def test_a_peer_that_dies_between_a_frame_and_its_tensors_is_lost(
    open_one: Open, transports: str, far_worker: Start, carriers: list[Carrier]
) -> None:
    near = open_one("near")
    far = far_worker(f"{transports}/cpu")
    link: Any = await near.connect(far.address, "far", HANG_S)
    taken, arrived = carriers[0].note_taken(), asyncio.Event()
    # As if it had not come.
    carriers[0].parcels.arrived = lambda found: arrived.set()  # type: ignore[method-assign]
    exchange = asyncio.create_task(near.exchange([(link, request(torch.ones(4, 8)))], HANG_S))
    await arrived.wait()

    far.signal(signal.SIGKILL)

    [outcome] = await exchange
    assert isinstance(outcome, PeerLost)
    assert len(taken) == 1
    gc.collect()
    assert is_free(taken)
