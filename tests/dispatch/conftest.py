"""Expert hosts and a dispatcher in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.rung import Rung
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.messages.wire import WireDtype
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import Gate
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import FrameLimits
from moesaic.transport.inprocess import Hub, InProcessNetwork

CPU, FP32 = torch.device("cpu"), torch.float32
NUM_EXPERTS, NUM_LAYERS = 8, 3


class Cluster:
    """Expert hosts behind in-process networks, one routed dispatcher, and the local one as the reference."""

    def __init__(
        self,
        model: Any,
        num_workers: int,
        slots: int = NUM_EXPERTS,
        scheduling: ExpertScheduling = "aebs",
        deterministic: bool = False,
        wire: WireDtype = "own",
        dtype: torch.dtype = FP32,
        where: torch.device = CPU,
        rung: Rung | None = None,
    ) -> None:
        self.where, self.rung = where, rung or Rung()
        self.config, self.checkpoint = load_config(model.directory), Checkpoint(model.directory)
        self.hub, self.limits = Hub(), FrameLimits.of_hidden_size(self.config.hidden_size)
        self.hosts = [
            ExpertHost(self.checkpoint, self.config, f"expert-{n}", slots, dtype, where)
            for n in range(num_workers)
        ]
        self.networks = [self._network(host.epochs._worker_id) for host in self.hosts]
        self.addresses: list[str] = []
        gates = {
            layer: Gate.load(self.checkpoint, self.config, layer, dtype, where)
            for layer in self.config.moe_layers
        }
        self.client = self._network("attention-0")
        self.routed = RoutedDispatcher(
            self.client,
            gates,
            2.0,
            scheduling,
            deterministic=deterministic,
            wire=wire,
            rung_of=LogicalExperts(self.checkpoint, self.config).layer_rung,
        )
        self.local = LocalDispatcher(self.checkpoint, self.config, dtype, where)
        self.local.adopt(self.local.rungs.load(rung) if rung else None)

    def _network(self, worker_id: str) -> InProcessNetwork:
        return InProcessNetwork(worker_id, b"secret", self.limits, self.hub)

    def placement(self, epoch: int, *slots: list[int]) -> Placement:
        """The same slots in every layer; united experts follow the own ones."""
        num_united = self.rung.num_united(NUM_EXPERTS)
        return Placement(
            epoch=epoch,
            model_digest=self.config.digest,
            num_experts=NUM_EXPERTS + num_united,
            rung=self.rung,
            num_united=num_united,
            workers=[
                PlacedWorker(
                    worker_id=f"expert-{n}",
                    generation=1,
                    admin_address="",
                    data_address=self.addresses[n],
                )
                for n in range(len(slots))
            ],
            layers=list(range(NUM_LAYERS)),
            slots=[[list(s) for s in slots] for _ in range(NUM_LAYERS)],
        )

    def put_in_force(self, placement: Placement) -> None:
        """What the scheduler does."""
        for host in self.hosts[: len(placement.workers)]:
            host.prepare(placement)
        for host in self.hosts[: len(placement.workers)]:
            host.epochs.commit(placement.epoch)
        self.routed.set_placement(placement)

    async def check(self, rows: int = 7) -> int:
        """Compare every layer; returns the epoch it ran under."""
        await asyncio.wait_for(self.routed.reachable(), 5)
        step = self.routed.begin_step()
        for layer in range(NUM_LAYERS):
            hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows + layer))
            got = await self.routed.dispatch(step, layer, hidden)
            expected = await self.local.dispatch(self.local.begin_step(), layer, hidden)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # sums in another order
        self.routed.end_step(step)
        return step.epoch


@asynccontextmanager
async def open_cluster(
    model: Any,
    num_workers: int,
    slots: int = NUM_EXPERTS,
    scheduling: ExpertScheduling = "aebs",
    deterministic: bool = False,
    wire: WireDtype = "own",
    dtype: torch.dtype = FP32,
    rung: Rung | None = None,
) -> AsyncIterator[Cluster]:
    c = Cluster(model, num_workers, slots, scheduling, deterministic, wire, dtype, rung=rung)
    for host, network in zip(c.hosts, c.networks, strict=True):
        c.addresses.append(await network.listen("memory", 0, host.answer))
    try:
        yield c
    finally:
        await c.routed.close()
        for network in (c.client, *c.networks):
            await network.close()


@pytest.fixture
def cluster() -> Any:
    """``async with cluster(model, num_workers) as c``: a ``Cluster`` that listens."""
    return open_cluster


@pytest.fixture
def unlinked_cluster() -> Any:
    """``Cluster``: its hosts listen nowhere."""
    return Cluster
