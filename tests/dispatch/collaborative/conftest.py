"""Edge sites in one process: each answers the others, and has a dispatcher of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.common.placements import placed_worker, placement_of
from moesaic.dispatch.collaborative.dispatcher import CollaborativeDispatcher, SiteParts
from moesaic.dispatch.collaborative.file_cache import FileCache
from moesaic.dispatch.collaborative.peers import Peers
from moesaic.dispatch.local import LocalDispatcher
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.host import ExpertHost
from moesaic.experts.pace import LoadPace
from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import FrameLimits
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import CPU, FP32, TIMEOUT_S


@dataclass
class Site:
    """One site."""

    host: ExpertHost
    served: InProcessNetwork
    dialling: InProcessNetwork
    peers: Peers
    files: FileCache | None
    dispatcher: CollaborativeDispatcher
    meter: ActivationMeter


class Sites:
    """Sites of one model, and the local dispatcher as the reference."""

    def __init__(
        self,
        model: Any,
        count: int,
        *,
        files: bool,
        deterministic: bool,
        where: torch.device = CPU,
    ) -> None:
        self.where = where
        self.config, self.checkpoint = load_config(model.directory), Checkpoint(model.directory)
        self.hub, self.limits = Hub(), FrameLimits.of_hidden_size(self.config.hidden_size)
        self.sites = [self._site(n, files, deterministic) for n in range(count)]
        self.local = LocalDispatcher(self.checkpoint, self.config, FP32, self.where)
        self.addresses: list[str] = []

    def _site(self, n: int, with_files: bool, deterministic: bool) -> Site:
        config, name = self.config, f"agent-{n}"
        num_experts = config.moe.num_experts
        host = ExpertHost(self.checkpoint, config, name, num_experts, FP32, self.where)
        served, dialling = (
            InProcessNetwork(name, b"secret", self.limits, self.hub) for _ in range(2)
        )
        peers, meter = Peers(dialling, TIMEOUT_S), ActivationMeter(num_experts)
        files = None
        if with_files:
            bring = host.files.bring(LoadPace())
            files = FileCache(bring, config.moe_layers, num_experts, 4)
        gates = load_gates(self.checkpoint, config, FP32, self.where)
        substitution_of = LogicalExperts(self.checkpoint, config).layer_substitution
        parts = SiteParts(host.epochs, gates, peers, files, substitution_of, meter)
        dispatcher = CollaborativeDispatcher(parts, config, FP32, deterministic=deterministic)
        return Site(host, served, dialling, peers, files, dispatcher, meter)

    def placement(
        self, epoch: int, *held: list[int], substitution: Substitution | None = None
    ) -> Placement:
        """The same experts in every layer."""
        return placement_of(
            [placed_worker(f"agent-{n}", self.addresses[n]) for n in range(len(held))],
            held,
            self.config.moe_layers,
            self.config.moe.num_experts,
            epoch=epoch,
            model_digest=self.config.digest,
            substitution=substitution or Substitution(),
        )

    def put_in_force(self, placement: Placement, *, at: list[int] | None = None) -> None:
        """What the scheduler does, at some sites or all."""
        chosen = [site for n, site in enumerate(self.sites) if at is None or n in at]
        for site in chosen:
            site.host.loader.prepare(placement)
        for site in chosen:
            site.host.epochs.commit(placement.epoch)

    async def linked(self) -> None:
        """Wait until every site has a link to all others."""
        for site in self.sites:
            view = site.dispatcher.view
            while len(site.peers.live(view)) < len(view.peers):
                await site.peers.linked(0.05)

    async def check(self, n: int, rows: int = 7, *, has_bits: bool = False) -> None:
        """Run a step of one site, and compare it with ``local``."""
        opened = contract.Opened(self.sites[n].dispatcher, self.local, self.config, has_bits)
        await opened.step(rows)


@pytest.fixture
def sites() -> Any:
    """``async with sites(model, count) as s``: ``Sites`` that answer each other."""

    @asynccontextmanager
    async def opened(
        model: Any,
        count: int,
        *,
        files: bool = False,
        deterministic: bool = False,
        where: torch.device = CPU,
    ) -> AsyncIterator[Sites]:
        with torch.inference_mode():
            s = Sites(model, count, files=files, deterministic=deterministic, where=where)
            for site in s.sites:
                s.addresses.append(await site.served.listen("memory", 0, site.host.answers.answer))
            try:
                yield s
            finally:
                for site in s.sites:
                    await site.dispatcher.close()
                    await site.served.close()
                    await site.dialling.close()

    return opened
