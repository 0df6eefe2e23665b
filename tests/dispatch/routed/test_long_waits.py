"""Long waits without Python: peers stay, are answered and are linked meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from benchmarks.common.placements import placed_worker
from moesaic.dispatch.route import plan_route
from moesaic.dispatch.routed.asking import AskedBatch, RoutedStep
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.routed.native import NativeAsking, SentBatch
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.errors import MoesaicError, StaleEpoch
from moesaic.messages.placement import Placement
from moesaic.native.library import library
from moesaic.transport import pulse
from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import TIMEOUT_S

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

LIMITS = FrameLimits.of_hidden_size(64)
LONG_S = 2.5  # a wait, longer than silent peers are kept


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EJECT_S", 1.5)
    monkeypatch.setattr(pulse, "SUSPECT_S", 0.5)
    monkeypatch.setattr(pulse, "INTERVAL_S", 0.05)


class Peers:
    """Processes' worth of networks, each on a thread of its own."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def network(self, name: str) -> tuple[EngineThread, UcxNetwork]:
        thread = await self._stack.enter_async_context(engine_thread(torch.device("cpu"), name))
        network = await thread.build(UcxNetwork, name, "expert", b"secret", LIMITS, "ring")
        self._stack.push_async_callback(lambda: thread.run(network.close()))
        return thread, network

    async def listening(self, name: str, answer: Any) -> str:
        thread, network = await self.network(name)
        address: str = await thread.run(network.listen("127.0.0.1", 0, answer))
        return address


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    async with AsyncExitStack() as stack:
        yield Peers(stack)


def slow(request: Frame) -> Frame:
    # A worker that computes for long: the length is what is tested, and nothing waits for it to be over by then.
    time.sleep(LONG_S)
    return request.reply([torch.ones(len(request.tensors[0]), 64)], digest=1)


def refusing(request: Frame) -> Frame:
    raise StaleEpoch(1, 2)


async def asked(network: UcxNetwork, addresses: dict[str, str]) -> tuple[SentBatch, list[Any]]:
    """Send rows to workers that have an expert each, of the one layer."""
    links = [await network.connect(address, name, TIMEOUT_S) for name, address in addresses.items()]
    placement = Placement(
        epoch=1,
        model_digest="",
        num_experts=len(links),
        workers=[placed_worker(name, address) for name, address in addresses.items()],
        layers=[0],
        slots=[[[n] for n in range(len(links))]],
    )
    route = plan_route(placement, dict(enumerate(links)))
    assert route is not None
    step = RoutedStep(bytes(16), 1, route=route)
    sent = NativeAsking(network, TIMEOUT_S, "own").begin(step, AskedBatch(0, torch.zeros(3, 64)))
    assert sent is not None
    return sent, links


async def test_a_worker_that_computes_long_is_kept_while_python_settles_its_exchange(
    peers: Peers,
) -> None:
    addresses = {
        "refusing": await peers.listening("refusing", refusing),
        "slow": await peers.listening("slow", slow),
    }
    thread, network = await peers.network("near")

    async def ask() -> tuple[list[Frame | MoesaicError], list[bool]]:
        sent, links = await asked(network, addresses)
        return await sent.outcomes(), [link.alive for link in links]

    (refusal, reply), alive = await thread.run(ask())

    assert isinstance(refusal, StaleEpoch)
    assert isinstance(reply, Frame)
    assert alive == [True, True]


async def test_peers_that_dialled_this_side_are_answered_during_a_long_wait(peers: Peers) -> None:
    thread, network = await peers.network("near")
    near = await thread.run(network.listen("127.0.0.1", 0, refusing))
    address = await peers.listening("slow", slow)
    theirs, their_network = await peers.network("neighbour")
    link = await theirs.run(their_network.connect(near, "near", TIMEOUT_S))

    async def ask() -> bool:
        sent, _ = await asked(network, {"slow": address})
        return sent.finish()  # nothing else runs on this loop meanwhile

    assert await thread.run(ask())

    assert link.alive


def compute() -> None:
    # It stands for a step that keeps the thread from its loop for this long; nothing waits for it to be over by then.
    time.sleep(LONG_S / 8)


@asynccontextmanager
async def busy(thread: EngineThread, between: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Has the thread compute steps, one after the other."""

    async def steps() -> None:
        while True:
            compute()
            await between()
            await asyncio.sleep(0)

    async def start() -> "asyncio.Task[None]":
        return asyncio.ensure_future(steps())

    running = await thread.run(start())
    yield
    thread.call(running.cancel)


async def test_workers_are_linked_between_long_steps(peers: Peers) -> None:
    address = await peers.listening("far", refusing)
    thread, network = await peers.network("near")
    dispatcher = await thread.build(RoutedDispatcher, network, {}, TIMEOUT_S)

    async with busy(thread, lambda: dispatcher.link_peers(LONG_S / 8)):
        link = await thread.run(network.connect(address, "far", TIMEOUT_S))

    assert link.alive
