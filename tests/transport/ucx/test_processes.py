"""Two real processes, and what can happen to one of them."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.errors import DeadlineExceeded, PeerLost
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx import bindings
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.conftest import BY_PYTHON
from tests.transport.linked import HANG_S

Ask = Callable[..., Frame]
Start = Callable[[str], Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

SHM = ["shm", "shm" + BY_PYTHON]


@pytest.fixture
def transports(request: pytest.FixtureRequest) -> str:
    """Those that the ``network`` fixture was made with, for the far side."""
    return str(request.node.callspec.params["network"]).removesuffix(BY_PYTHON)


@pytest.mark.parametrize("far_is_auto", [True, False])
async def test_processes_exchange_frames_and_part_in_silence(
    network: UcxNetwork,
    transports: str,
    far_is_auto: bool,
    far_worker: Start,
    ask: Ask,
    until: Until,
) -> None:
    offered_by_all = transports in ("ring", "socket")
    far = far_worker("auto" if far_is_auto and offered_by_all else transports)
    link = await network.connect(far.address, "far", HANG_S)
    requests = [ask(seq=seq, rows=rows) for seq, rows in enumerate((1, 16, 300))]

    answers = await network.exchange([(link, request) for request in requests], HANG_S)

    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, Frame)
        assert torch.equal(answer.tensors[0], request.tensors[0])
    await network.close()
    far.signal(signal.SIGTERM)
    await until(lambda: not far.exists())
    assert far.complaints.read_text() == ""


async def test_a_prefill_of_16_megabytes_arrives(
    network: UcxNetwork, transports: str, far_worker: Start
) -> None:
    link = await network.connect(far_worker(transports).address, "far", HANG_S)
    hidden = torch.arange(1024 * 4096, dtype=torch.float32).view(1024, 4096)

    answers = await network.exchange(
        [(link, Frame(kind=FrameKind.REQUEST, seq=seq, tensors=[hidden])) for seq in range(2)],
        HANG_S,
    )

    for answer in answers:
        assert isinstance(answer, Frame)
        assert torch.equal(answer.tensors[0], hidden)


async def test_a_killed_peer_is_lost_at_once(
    network: UcxNetwork, transports: str, far_worker: Start, ask: Ask
) -> None:
    far = far_worker(transports)
    link = await network.connect(far.address, "far", HANG_S)
    exchange = asyncio.create_task(network.exchange([(link, ask(flags=1))], HANG_S))
    await a_few_turns()

    far.signal(signal.SIGKILL)

    (outcome,) = await exchange
    assert isinstance(outcome, PeerLost)
    assert not link.alive


async def test_a_peer_killed_while_it_receives_is_lost(
    network: UcxNetwork, transports: str, far_worker: Start
) -> None:
    far = far_worker(transports)
    link = await network.connect(far.address, "far", HANG_S)
    hidden = torch.zeros(4096, 4096)
    far.signal(signal.SIGSTOP)  # so that nothing of the message is taken
    exchange = asyncio.create_task(
        network.exchange([(link, Frame(kind=FrameKind.REQUEST, tensors=[hidden]))], HANG_S)
    )
    await a_few_turns()

    far.signal(signal.SIGKILL)

    (outcome,) = await exchange
    assert isinstance(outcome, PeerLost)


@pytest.mark.parametrize("network", SHM, indirect=True)
async def test_a_peer_that_dies_with_messages_under_way_leaves_none_of_its_memory_with_us(
    network: UcxNetwork, far_worker: Start, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "_DRAIN_S", 0.5)
    far = far_worker("shm")
    link = await network.connect(far.address, "far", HANG_S)
    with_one_peer = num_shared_segments()
    hidden = torch.zeros(64, 4096)  # 1 MB
    far.signal(signal.SIGSTOP)  # so that nothing of the messages is taken

    await network.exchange(
        [(link, Frame(kind=FrameKind.REQUEST, seq=seq, tensors=[hidden])) for seq in range(4)], 0.2
    )
    far.signal(signal.SIGKILL)
    await network.connect(far_worker("shm").address, "far", HANG_S)

    await until(lambda: num_shared_segments() <= with_one_peer)


async def test_a_late_answer_of_a_hung_peer_reaches_nobody(
    network: UcxNetwork, transports: str, far_worker: Start, ask: Ask
) -> None:
    far = far_worker(transports)
    link = await network.connect(far.address, "far", HANG_S)
    slow, next_one = ask(seq=1, rows=2), ask(seq=1, rows=3)
    far.signal(signal.SIGSTOP)

    (outcome,) = await network.exchange([(link, slow)], 0.2)
    far.signal(signal.SIGCONT)
    fresh = await network.connect(far.address, "far", HANG_S)
    (answer,) = await network.exchange([(fresh, next_one)], HANG_S)

    assert isinstance(outcome, DeadlineExceeded)
    assert not link.alive
    assert isinstance(answer, Frame)
    assert answer.tensors[0].shape == (3, 256)


async def test_a_hung_peer_on_an_idle_link_is_ejected(
    network: UcxNetwork, transports: str, far_worker: Start, until: Until
) -> None:
    far = far_worker(transports)
    link = await network.connect(far.address, "far", HANG_S)

    far.signal(signal.SIGSTOP)

    await until(lambda: not link.alive)


async def test_closing_does_not_wait_for_a_hung_peer(
    network: UcxNetwork, transports: str, far_worker: Start
) -> None:
    far = far_worker(transports)
    link = await network.connect(far.address, "far", HANG_S)
    far.signal(signal.SIGSTOP)
    hidden = torch.zeros(1024, 4096)
    calls = [(link, Frame(kind=FrameKind.REQUEST, seq=seq, tensors=[hidden])) for seq in range(4)]
    exchange = asyncio.create_task(network.exchange(calls, HANG_S))
    await a_few_turns()

    await network.close()

    assert {type(outcome) for outcome in await exchange} == {PeerLost}


async def test_an_idle_link_costs_next_to_nothing(
    network: UcxNetwork, transports: str, far_worker: Start
) -> None:
    far = far_worker(transports)
    link = await network.connect(far.address, "far", HANG_S)
    await link.probe(0, HANG_S)
    before = time.process_time(), _cpu_s(far.pid)

    # Only time shows work that goes on and on.
    await asyncio.sleep(1.0)

    assert time.process_time() - before[0] < 0.1
    assert _cpu_s(far.pid) - before[1] < 0.1
    assert link.alive


async def a_few_turns() -> None:
    """Let an exchange begin: its messages are on their way by then."""
    for _ in range(10):
        await asyncio.sleep(0)


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def num_shared_segments() -> int:
    """Mappings of memory that other processes may have as well."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/SYSV" in line or "/dev/shm" in line for line in maps)
