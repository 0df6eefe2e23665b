"""Shared memory after a peer that died before it took all that was sent to it."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest
import torch

from moesaic.errors import PeerLost
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx import bindings
from moesaic.transport.ucx import network as network_module
from moesaic.transport.ucx.bindings import UcxWorker
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.planes import PlaneOffer
from tests.transport.conftest import Plane
from tests.transport.linked import HANG_S, never
from tests.transport.ucx.test_processes import SHM, num_shared_segments

Ask = Callable[..., Frame]
Start = Callable[[str], Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


async def _fill(network: UcxNetwork, far: Any) -> None:
    """Send more than the shared memory of ``far`` takes, while it takes nothing."""
    link = await network.connect(far.address, "far", HANG_S)
    hidden = torch.ones(512, 4096)  # 8 MB
    far.signal(signal.SIGSTOP)
    calls = [(link, Frame(kind=FrameKind.REQUEST, seq=seq, tensors=[hidden])) for seq in range(2)]
    await network.exchange(calls, 0.2)


@pytest.mark.parametrize("network", SHM, indirect=True)
async def test_a_peer_killed_before_it_took_all_leaves_no_work_behind(
    network: UcxNetwork,
    far_worker: Start,
    ask: Ask,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bindings, "_DRAIN_S", 0.5)
    far, other = far_worker("shm"), far_worker("shm")
    bystander = await network.connect(other.address, "far", HANG_S)
    segments, descriptors = num_shared_segments(), _num_descriptors()
    await _fill(network, far)

    far.signal(signal.SIGKILL)

    await until(lambda: not bystander.alive)  # everybody on that plane dials again
    again = await network.connect(other.address, "far", HANG_S)
    (answer,) = await network.exchange([(again, ask())], HANG_S)
    assert isinstance(answer, Frame)
    await until(lambda: num_shared_segments() <= segments)
    await until(lambda: _num_descriptors() <= descriptors)
    before = time.process_time()
    # Only time shows work that goes on and on.
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("network", SHM, indirect=True)
async def test_while_a_hung_peer_takes_nothing_ucx_gets_one_turn_at_a_time(
    network: UcxNetwork, far_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0

    def counted(worker: UcxWorker) -> None:
        nonlocal turns
        turns += 1
        progress(worker)

    progress = UcxWorker._progress
    monkeypatch.setattr(UcxWorker, "_progress", counted)
    awake = await network.connect(far_worker("shm").address, "far", HANG_S)
    await _fill(network, far_worker("shm"))
    for _ in range(3):  # its answers wake us meanwhile
        await awake.probe(0, HANG_S)

    turns = 0
    for _ in range(100):
        await asyncio.sleep(0)

    assert 0 < turns <= 200


@pytest.mark.parametrize("cluster", SHM, indirect=True)
async def test_a_dial_that_a_renewed_plane_overtakes_fails_at_once_and_the_next_succeeds(
    cluster: Any,
    echo: Handler,
    ask: Ask,
    planes: list[Plane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = cluster.network("near"), cluster.network("far")
    address = await far.listen("127.0.0.1", 0, echo)
    choose = network_module.choose_plane

    def choose_too_late(offer: PlaneOffer, own: Collection[str]) -> str:
        planes[0].renew()  # of the near side
        return choose(offer, own)

    monkeypatch.setattr(network_module, "choose_plane", choose_too_late)
    with pytest.raises(PeerLost, match="renewed"):
        await near.connect(address, "far", HANG_S)
    monkeypatch.setattr(network_module, "choose_plane", choose)

    link = await near.connect(address, "far", HANG_S)
    (answer,) = await near.exchange([(link, ask())], HANG_S)
    assert isinstance(answer, Frame)


@pytest.mark.parametrize("cluster", SHM, indirect=True)
async def test_what_is_outstanding_when_a_plane_is_renewed_is_lost_on_both_ends(
    cluster: Any, ask: Ask, until: Until, planes: list[Plane]
) -> None:
    asked = asyncio.Event()

    async def answer(request: Frame) -> Frame:
        asked.set()
        return await never(request)

    near, far = cluster.network("near"), cluster.network("far")
    link = await near.connect(await far.listen("127.0.0.1", 0, answer), "far", HANG_S)
    exchange = asyncio.create_task(near.exchange([(link, ask())], HANG_S))
    await asked.wait()

    planes[0].renew()

    (outcome,) = await exchange
    assert isinstance(outcome, PeerLost)
    await until(lambda: far.served_peers == [])


@pytest.mark.parametrize("cluster", SHM, indirect=True)
async def test_renewing_a_plane_in_the_middle_of_answers_gets_nobody_else_stuck(
    cluster: Any, ask: Ask, planes: list[Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "_STUCK_S", 0.3)
    hidden = torch.ones(2048, 4096)  # 32 MB, more than shared memory takes at once
    near, far = cluster.network("near"), cluster.network("far")

    def answer(request: Frame) -> Frame:
        if request.flags:
            asyncio.get_running_loop().call_soon(planes[0].renew)  # once the answer is posted
        return request.reply([hidden])

    address = await far.listen("127.0.0.1", 0, answer)

    for _ in range(3):
        link = await near.connect(address, "far", HANG_S)
        assert isinstance((await near.exchange([(link, ask(flags=1))], HANG_S))[0], PeerLost)
        # Nothing tells that it was not found stuck but that the time for it is over.
        await asyncio.sleep(0.5)

    assert len(planes) == 2 + 3  # one each, and three more of the near side
    link = await near.connect(address, "far", HANG_S)
    assert isinstance((await near.exchange([(link, ask())], HANG_S))[0], Frame)


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
