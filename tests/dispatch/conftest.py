"""Expert hosts and a dispatcher in one process."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from prometheus_client import Counter
from torch import Tensor

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.common.placements import placed_worker, placement_of
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.messages.substitution import Substitution
from moesaic.messages.wire import WireDtype
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameLimits
from tests.waiting import until

CPU, FP32 = torch.device("cpu"), torch.float32
NUM_EXPERTS, NUM_LAYERS = 8, 3
TIMEOUT_S = 60.0  # names a hang; nothing here takes a hundredth of it on an idle machine


def value_of(counter: Counter, *labels: str) -> float:
    """The value of a counter now."""
    series = counter.labels(*labels) if labels else counter
    samples = (sample for metric in series.collect() for sample in metric.samples)
    return next(sample.value for sample in samples if sample.name.endswith("_total"))


class CrookedCheckpoint(Checkpoint):
    """A model whose gate of layer 1 prefers the experts that the true one chooses last."""

    def read(self, name: str, *how: Any) -> Tensor:
        found = super().read(name, *how)
        return -found if name == "model.layers.1.mlp.gate.weight" else found


class Cluster:
    """Expert hosts behind in-process networks, one routed dispatcher, and the local one as the reference.

    Attributes:
        answers: what each worker serves requests by, from now on.
    """

    listens_on = "memory"

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
        substitution: Substitution | None = None,
        crooked: Collection[int] = (),
    ) -> None:
        """Workers in ``crooked`` choose other experts than they should, at layer 1."""
        self.where, self.substitution = where, substitution or Substitution()
        self.config, self.checkpoint = load_config(model.directory), Checkpoint(model.directory)
        self.hub, self.limits = Hub(), FrameLimits.of_hidden_size(self.config.hidden_size)
        self.hosts = [
            ExpertHost(
                CrookedCheckpoint(model.directory) if n in crooked else self.checkpoint,
                self.config,
                f"expert-{n}",
                slots,
                dtype,
                where,
            )
            for n in range(num_workers)
        ]
        self.answers: list[Handler] = [host.answers.answer for host in self.hosts]
        self.networks = [self.network(f"expert-{n}") for n in range(num_workers)]
        self.addresses = [""] * num_workers
        self.gates = load_gates(self.checkpoint, self.config, dtype, where)
        self.client = self.network("attention-0")
        self.routed = RoutedDispatcher(
            self.client,
            self.gates,
            TIMEOUT_S,
            scheduling,
            deterministic=deterministic,
            wire=wire,
            substitution_of=LogicalExperts(self.checkpoint, self.config).layer_substitution,
        )
        self.local = LocalDispatcher(self.checkpoint, self.config, dtype, where)
        self.local.adopt(self.local.substitutions.load(substitution) if substitution else None)

    def network(self, worker_id: str) -> Any:
        """A network to the others."""
        return InProcessNetwork(worker_id, b"secret", self.limits, self.hub)

    async def listen(self, n: int) -> None:
        """Let a worker serve, over the network that it has now."""

        def answer(request: Frame) -> Any:
            return self.answers[n](request)

        self.addresses[n] = await self.networks[n].listen(self.listens_on, 0, answer)

    async def restart(self, n: int) -> None:
        """Give a worker whose network is closed another one, and another address."""
        self.networks[n] = self.network(f"expert-{n}")
        await self.listen(n)

    async def all_linked(self, epoch: int) -> None:
        """Wait for every worker: with replicas a step could begin with fewer, and add up in another order."""
        workers = len(self.networks)
        await until(
            lambda: (r := self.routed.route_of(epoch)) is not None and len(r.live) == workers
        )

    def placement(self, epoch: int, *slots: list[int]) -> Placement:
        """The same slots in every layer; united experts follow the own ones."""
        num_united = self.substitution.num_united(NUM_EXPERTS)
        return placement_of(
            [placed_worker(f"expert-{n}", self.addresses[n]) for n in range(len(slots))],
            slots,
            range(NUM_LAYERS),
            NUM_EXPERTS + num_united,
            epoch=epoch,
            model_digest=self.config.digest,
            substitution=self.substitution,
            num_united=num_united,
        )

    def put_in_force(self, placement: Placement) -> None:
        """What the scheduler does."""
        for host in self.hosts[: len(placement.workers)]:
            host.loader.prepare(placement)
        for host in self.hosts[: len(placement.workers)]:
            host.epochs.commit(placement.epoch)
        self.routed.set_placement(placement)

    async def check(self, rows: int = 7) -> int:
        """Compare every layer; returns the epoch it ran under."""
        await self.routed.reachable()
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
    model: Any, num_workers: int, *, of: type[Cluster] = Cluster, **options: Any
) -> AsyncIterator[Any]:
    c = of(model, num_workers, **options)
    for n in range(num_workers):
        await c.listen(n)
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
