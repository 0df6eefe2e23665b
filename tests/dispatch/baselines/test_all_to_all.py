"""Workers that compute every layer together give local sums, whoever of them has rows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from moesaic.dispatch.baselines.all_to_all import AllToAllDispatcher
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.local import LocalDispatcher
from moesaic.errors import ExpertUnavailable, NotReady
from moesaic.experts.pull.ranges import Share
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import FrameLimits
from moesaic.transport.inprocess import Hub, InProcessNetwork

CPU, FP32 = torch.device("cpu"), torch.float32


class Workers:
    """Dispatchers, and the local one as reference."""

    def __init__(self, model: Any, count: int) -> None:
        self.config, self.checkpoint = load_config(model.directory), Checkpoint(model.directory)
        self.local = LocalDispatcher(self.checkpoint, self.config, FP32, CPU)
        hub, limits = Hub(), FrameLimits.of_hidden_size(self.config.hidden_size)
        self.networks = [InProcessNetwork(f"{n}", b"s", limits, hub) for n in range(count)]
        self.workers = [
            AllToAllDispatcher(self.checkpoint, self.config, Share(n, count), FP32)
            for n in range(count)
        ]

    async def steps(self, worker: int, rows: list[int]) -> None:
        """Steps of so many rows each."""
        dispatcher = self.workers[worker]
        for count in rows:
            await asyncio.wait_for(dispatcher.reachable(), 5)
            step = dispatcher.begin_step()
            for layer in self.config.moe_layers:
                generator = torch.Generator().manual_seed(97 * worker + count + layer)
                hidden = torch.randn(count, self.config.hidden_size, generator=generator)
                got = await dispatcher.dispatch(step, layer, hidden)
                expected = await self.local.dispatch(self.local.begin_step(), layer, hidden)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            dispatcher.end_step(step)
            await asyncio.sleep(0)


@asynccontextmanager
async def workers_of(model: Any, count: int, timeout_s: float = 5.0) -> AsyncIterator[Workers]:
    workers = Workers(model, count)
    peers = []
    for n, (network, worker) in enumerate(zip(workers.networks, workers.workers, strict=True)):
        worker.connect(network, timeout_s)
        address = await network.listen("memory", 0, worker.answer)
        peers.append(Peer(str(n), 1, address, Share(n, count)))
    for n, worker in enumerate(workers.workers):
        worker.set_peers([peer for peer in peers if peer.worker_id != str(n)])
    try:
        for worker in workers.workers:
            await asyncio.wait_for(worker.reachable(), 5)
        yield workers
    finally:
        for worker in workers.workers:
            await worker.close()
        for network in workers.networks:
            await network.close()


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_all_at_once(tiny_model: Any, count: int) -> None:
    async with workers_of(tiny_model, count) as workers:
        await asyncio.gather(*(workers.steps(n, [3, 1, 40]) for n in range(count)))


async def test_whoever_has_no_rows_steps_along(tiny_model: Any) -> None:
    async with workers_of(tiny_model, 3) as workers:
        await workers.steps(0, [2, 2])
        await workers.steps(2, [5])
        await asyncio.gather(workers.steps(0, [1, 1, 1, 1]), workers.steps(1, [7]))
        await workers.steps(1, [3])


async def test_a_lost_worker_stops_all_and_they_say_so(tiny_model: Any) -> None:
    async with workers_of(tiny_model, 2, timeout_s=0.5) as workers:
        await workers.steps(0, [2])
        await workers.networks[1].close()
        left = workers.workers[0]

        with pytest.raises((ExpertUnavailable, NotReady)):
            await left.dispatch(left.begin_step(), 0, torch.randn(2, 32))
        assert "1/2" in left.waiting_for[0]


async def test_a_worker_that_was_away_catches_up(tiny_model: Any) -> None:
    async with workers_of(tiny_model, 2, timeout_s=0.3) as workers:
        await workers.steps(0, [2, 2, 2])
        back = workers.workers[1]
        back._round = 0  # as after a restart

        step = back.begin_step()
        with pytest.raises(ExpertUnavailable):
            await back.dispatch(step, 0, torch.randn(2, 32))
        back.end_step(step)

        assert back._round == workers.workers[0]._round
        await workers.steps(1, [3])
        await workers.steps(0, [3])
