"""Workers that compute every layer together give local sums, whoever of them has rows."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from benchmarks.common.inprocess import Hub, InProcessNetwork
from moesaic.dispatch.baselines.all_to_all import AllToAllDispatcher
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.local import LocalDispatcher
from moesaic.errors import ExpertUnavailable
from moesaic.experts.pull.ranges import Share
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import Frame, FrameLimits
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import CPU, FP32, TIMEOUT_S


class Workers:
    """Dispatchers, and the local one as reference."""

    def __init__(self, model: Any, count: int) -> None:
        self.count = count
        self.config, self.checkpoint = load_config(model.directory), Checkpoint(model.directory)
        self.local = LocalDispatcher(self.checkpoint, self.config, FP32, CPU)
        hub, limits = Hub(), FrameLimits.of_hidden_size(self.config.hidden_size)
        self.networks = [InProcessNetwork(f"{n}", b"s", limits, hub) for n in range(count)]
        self.workers = [self._worker(n) for n in range(count)]
        self.peers: list[Peer] = []

    def _worker(self, n: int) -> AllToAllDispatcher:
        share = Share(n, self.count)
        worker = AllToAllDispatcher(self.checkpoint, self.config, share, FP32)
        worker.connect(self.networks[n], TIMEOUT_S)
        return worker

    async def listen(self) -> None:
        """Let all be reached."""
        for n, network in enumerate(self.networks):

            def answer(request: Frame, n: int = n) -> Awaitable[Frame]:
                return self.workers[n].answer(request)

            address = await network.listen("memory", 0, answer)
            self.peers.append(Peer(str(n), 1, address, Share(n, self.count)))

    async def meet(self) -> None:
        """Tell all of each other, and wait until they are linked."""
        for n, worker in enumerate(self.workers):
            worker.set_peers([peer for peer in self.peers if peer.worker_id != str(n)])
        for worker in self.workers:
            await worker.reachable()

    async def restart(self, n: int) -> AllToAllDispatcher:
        """Replace a worker by one that knows of no round."""
        await self.workers[n].close()
        self.workers[n] = self._worker(n)
        await self.meet()
        return self.workers[n]

    async def steps(self, worker: int, rows: list[int]) -> None:
        """Steps of so many rows each."""
        dispatcher = self.workers[worker]
        for count in rows:
            await dispatcher.reachable()
            await contract.Opened(dispatcher, self.local, self.config).step(count)
            await asyncio.sleep(0)


@asynccontextmanager
async def workers_of(model: Any, count: int) -> AsyncIterator[Workers]:
    workers = Workers(model, count)
    await workers.listen()
    try:
        yield workers
    finally:
        for worker in workers.workers:
            await worker.close()
        for network in workers.networks:
            await network.close()


class TestAllToAll(contract.DispatcherContract, contract.RemoteContract):
    @pytest.fixture
    async def opened(self, tiny_model: Any) -> AsyncIterator[contract.Opened]:
        async with workers_of(tiny_model, 2) as workers:
            await workers.meet()
            dispatcher, lose = workers.workers[0], workers.networks[1].close
            yield contract.Opened(dispatcher, workers.local, workers.config, False, lose, "1/2")

    @pytest.fixture
    async def unreached(self, tiny_model: Any) -> AsyncIterator[contract.Unreached]:
        async with workers_of(tiny_model, 2) as workers:
            yield contract.Unreached(
                workers.workers[0], "attention workers with the shares 1/2", workers.meet
            )


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_all_at_once(tiny_model: Any, count: int) -> None:
    async with workers_of(tiny_model, count) as workers:
        await workers.meet()
        await asyncio.gather(*(workers.steps(n, [3, 1, 40]) for n in range(count)))


async def test_whoever_has_no_rows_steps_along(tiny_model: Any) -> None:
    async with workers_of(tiny_model, 3) as workers:
        await workers.meet()
        await workers.steps(0, [2, 2])
        await workers.steps(2, [5])
        await asyncio.gather(workers.steps(0, [1, 1, 1, 1]), workers.steps(1, [7]))
        await workers.steps(1, [3])


async def test_a_worker_that_was_away_catches_up(tiny_model: Any) -> None:
    async with workers_of(tiny_model, 2) as workers:
        await workers.meet()
        await workers.steps(0, [2, 2, 2])

        back = await workers.restart(1)
        step = back.begin_step()
        with pytest.raises(ExpertUnavailable):
            await back.dispatch(step, 0, torch.randn(2, 32))
        back.end_step(step)

        await workers.steps(1, [3])
        await workers.steps(0, [3])
