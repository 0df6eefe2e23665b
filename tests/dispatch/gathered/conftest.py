"""Workers that stream a model's experts, in this process, and the local dispatcher as reference."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.parity.cases import ParityCase, build_reference
from moesaic.dispatch.gathered.assembly import GatheredParts, assemble
from moesaic.dispatch.gathered.device import DeviceStreams
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.gathered.plan import plan_gather
from moesaic.dispatch.local import LocalDispatcher
from moesaic.experts import pieces
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pull.frames import PULL_LIMITS
from moesaic.experts.pull.ranges import Share
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import CPU

DEEP = ParityCase("qwen3_moe", "seven layers", {"num_hidden_layers": 7})


@dataclass
class Workers:
    """Streaming workers, one per share.

    Attributes:
        answers: what each worker serves pulls by, from now on.
    """

    make_local: Callable[[], LocalDispatcher]
    config: ModelConfig
    workers: list[GatheredParts] = field(default_factory=list)
    networks: list[InProcessNetwork] = field(default_factory=list)
    answers: list[Handler] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    hub: Hub = field(default_factory=Hub)

    @cached_property
    def local(self) -> LocalDispatcher:
        """The reference."""
        return self.make_local()

    @property
    def layers(self) -> Sequence[int]:
        return self.config.moe_layers

    def opened(self, worker: int) -> contract.Opened:
        """A worker's dispatcher."""
        dispatcher = self.workers[worker].dispatcher
        return contract.Opened(dispatcher, self.local, self.config, has_bits=True)

    async def step(self, worker: int = 0, rows: int = 9, upto: int | None = None) -> None:
        """Run one step; every layer must give the very bits of the local dispatcher."""
        await self.opened(worker).step(rows, self.layers[:upto])

    async def slice(self, layer: int, worker: int = 0, rows: int = 9) -> None:
        """Run one slice of a sweep: a step of one layer, whichever that is; checked likewise."""
        await self.opened(worker).step(rows, (layer,))


Start = Callable[..., Any]


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of seven layers with eight experts each."""
    directory = tmp_path_factory.mktemp("deep")
    build_reference(DEEP, directory)
    return directory


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts workers; an async context manager. Even small layers take several pulls."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 15)

    async def here(work: Awaitable[Any]) -> Any:
        return await work

    @asynccontextmanager
    async def started(
        directory: Path,
        count: int = 1,
        *,
        offload: bool = False,
        window: int = 1,
        quantization: Any = "none",
        dtype: torch.dtype = torch.float32,
        linked: bool = True,
        streams: Callable[[], DeviceStreams] | None = None,
        device: torch.device = CPU,
    ) -> AsyncIterator[Workers]:
        config, checkpoint = load_config(directory), Checkpoint(directory)
        numbers = dtype, device, quantization
        files = ExpertFiles(checkpoint, config, *numbers)
        all_workers = Workers(partial(LocalDispatcher, checkpoint, config, *numbers), config)
        hub, peers = all_workers.hub, all_workers.peers
        async with AsyncExitStack() as parts:
            for index in range(count):
                plan = plan_gather(
                    config.moe_layers,
                    config.moe.num_experts,
                    files.expert_bytes,
                    share=Share(index, count),
                    offload=offload,
                    window=window,
                    on_device=streams is not None,
                )
                network = InProcessNetwork(f"worker-{index}", b"secret", PULL_LIMITS, hub)
                parts.push_async_callback(network.close)
                worker = await parts.enter_async_context(
                    assemble(
                        plan,
                        files,
                        load_gates(checkpoint, config, dtype, device),
                        here,
                        model_digest=config.digest,
                        directory=tmp_path / "offloaded" / str(index),
                        network=network,
                        streams=streams() if streams else None,
                    )
                )

                def answer(request: Frame, index: int = index) -> Any:
                    return all_workers.answers[index](request)

                all_workers.answers.append(worker.server.answer)
                address = await network.listen("memory", 0, answer)
                peers.append(Peer(f"worker-{index}", 1, address, plan.share))
                all_workers.workers.append(worker)
                all_workers.networks.append(network)
            for worker in all_workers.workers:
                if linked:
                    worker.holders.set_peers(peers)
                    await worker.holders.complete()
                worker.dispatcher.prime()
            yield all_workers

    return started
