"""Attention and expert workers on named nodes, in this process, with real networks between them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.common.placements import placed_worker, placement_of
from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.two_phase.dispatcher import TwoPhaseDispatcher
from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.relay import ExpertRelay
from moesaic.dispatch.two_phase.waiting import RoundWaits
from moesaic.dispatch.two_phase.way import Mode
from moesaic.experts.host import ExpertHost
from moesaic.messages.wire import WireDtype
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import CPU, FP32, NUM_EXPERTS, NUM_LAYERS, TIMEOUT_S, CrookedCheckpoint
from tests.waiting import until

SECRET = b"secret"


@dataclass
class Expert:
    """An expert worker.

    Attributes:
        compute: what its relay computes its own share by.
        answer: what it serves requests by.
    """

    name: str
    host: ExpertHost
    network: Any
    compute: Callable[[Frame], Frame]
    address: str = ""

    def __post_init__(self) -> None:
        self.relay_over(self.network)

    def relay_over(self, network: Any) -> None:
        """Answer for the node from now on, by links to colleagues over a network."""

        def compute(request: Frame) -> Frame:
            return self.compute(request)

        self.relay = ExpertRelay(self.name, network, compute, self.host.epochs.placement)
        self.answer: Handler = self.relay.answer


@dataclass
class Attention:
    """An attention worker.

    Attributes:
        plain: dispatches steps of ``dispatcher`` over the same links, never in two phases.
        answer: what it serves requests by.
    """

    network: Any
    dispatcher: RoutedDispatcher
    plain: RoutedDispatcher
    two_phase: TwoPhaseDispatcher
    node: str
    answer: Handler
    contact: Endpoint = field(init=False)


@dataclass
class Lab:
    """Workers on the nodes that are named for each.

    Attributes:
        timeout_s: the longest wait for a layer in two phases.
        crooked: expert workers that choose other experts than they should, at layer 1.
    """

    model: Any
    kind: str
    attention_nodes: Sequence[str]
    expert_nodes: Sequence[str]
    mode: Mode
    timeout_s: float = TIMEOUT_S
    wire: WireDtype = "own"
    crooked: Collection[int] = ()
    where: torch.device = CPU
    hub: Hub = field(default_factory=Hub)
    experts: list[Expert] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)

    async def open(self) -> None:
        self.config, self.checkpoint = (
            load_config(self.model.directory),
            Checkpoint(self.model.directory),
        )
        self.local = LocalDispatcher(self.checkpoint, self.config, FP32, self.where)
        for idx in range(len(self.expert_nodes)):
            await self.add_expert(idx)
        for idx, node in enumerate(self.attention_nodes):
            await self.add_attention(idx, node)
        self.meet()

    async def add_expert(self, idx: int) -> None:
        name, directory = f"expert-{idx}", self.model.directory
        checkpoint = CrookedCheckpoint(directory) if idx in self.crooked else self.checkpoint
        host = ExpertHost(checkpoint, self.config, name, NUM_EXPERTS, FP32, self.where)
        expert = Expert(name, host, self.network(name), host.answers.answer)
        expert.address = await self._listen(expert)
        self.experts.append(expert)

    async def add_attention(self, idx: int, node: str) -> None:
        name, network = f"attention-{idx}", self.network(f"attention-{idx}")
        gates = load_gates(self.checkpoint, self.config, FP32, self.where)
        dispatcher, plain = (
            RoutedDispatcher(network, gates, TIMEOUT_S, wire=self.wire) for _ in range(2)
        )
        two_phase = TwoPhaseDispatcher(
            network, name, node, self.mode, self.timeout_s, dispatcher.route_of, self.wire
        )
        dispatcher.use(two_phase)
        worker = Attention(network, dispatcher, plain, two_phase, node, two_phase.answer)
        worker.contact = Endpoint(name, 1, await self._listen(worker))
        self.attention.append(worker)

    async def _listen(self, worker: Expert | Attention) -> str:
        def answer(request: Frame) -> Any:
            return worker.answer(request)

        where = "memory" if self.kind == "inprocess" else "127.0.0.1"
        address: str = await worker.network.listen(where, 0, answer)
        return address

    def meet(self) -> None:
        """Tell every attention worker who else is on its node."""
        for worker in self.attention:
            worker.two_phase.set_neighbours(
                [
                    other.contact
                    for other in self.attention
                    if other is not worker and other.node == worker.node
                ]
            )

    def network(self, worker_id: str, secret: bytes = SECRET) -> Any:
        limits = FrameLimits.of_hidden_size(self.config.hidden_size)
        if self.kind == "inprocess":
            return InProcessNetwork(worker_id, secret, limits, self.hub)
        return UcxNetwork(worker_id, "expert", secret, limits, transports=self.kind)  # type: ignore[arg-type]

    def place(self, epoch: int = 1) -> None:
        """Give every expert to one worker in turn, and the first two of them to a second one."""
        num = len(self.experts)
        held = [[e for e in range(NUM_EXPERTS) if e % num == n] for n in range(num)]
        for expert in (0, 1):
            if (worker := (expert + 1) % num) != expert % num:
                held[worker].append(expert)
        placement = placement_of(
            [
                placed_worker(f"expert-{n}", self.experts[n].address, node=self.expert_nodes[n])
                for n in range(num)
            ],
            held,
            range(NUM_LAYERS),
            NUM_EXPERTS,
            epoch=epoch,
            model_digest=self.config.digest,
        )
        for expert in self.experts:
            expert.host.loader.prepare(placement)
        for expert in self.experts:
            expert.host.epochs.commit(epoch)
        for worker in self.attention:
            worker.dispatcher.set_placement(placement)

    async def linked(self) -> None:
        """Wait until all are linked to the expert workers, and to their lead."""
        leads: dict[str, str] = {}
        for worker in self.attention:
            await worker.dispatcher.reachable()
            lead = leads.setdefault(worker.node, worker.contact.worker_id)
            wanted = lead if lead != worker.contact.worker_id else None
            await until(lambda worker=worker, wanted=wanted: worker.two_phase.lead == wanted)

    async def step(self, worker: int, rows: int, seed: int = 0) -> list[Tensor]:
        """One step of one attention worker; what every layer gave."""
        dispatcher = self.attention[worker].dispatcher
        step = dispatcher.begin_step()
        try:
            return [
                await dispatcher.dispatch(step, layer, self.rows(rows, seed + worker, layer))
                for layer in range(NUM_LAYERS)
            ]
        finally:
            dispatcher.end_step(step)

    def rows(self, rows: int, seed: int, layer: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + layer)
        return torch.randn(rows, self.config.hidden_size, generator=generator).to(self.where)

    async def expected(self, worker: int, rows: int, seed: int = 0) -> list[Tensor]:
        """The same from local experts; sums in another order."""
        step = self.local.begin_step()
        return [
            await self.local.dispatch(step, layer, self.rows(rows, seed + worker, layer))
            for layer in range(NUM_LAYERS)
        ]

    async def direct(self, worker: int, rows: int, seed: int = 0) -> list[Tensor]:
        """The same without two phases; sums in the same order, so the same bits."""
        asked = self.attention[worker]
        step = asked.dispatcher.begin_step()
        found = [
            await asked.plain.dispatch(step, layer, self.rows(rows, seed + worker, layer))
            for layer in range(NUM_LAYERS)
        ]
        asked.dispatcher.end_step(step)
        return found

    async def check(self, rows: Sequence[int], seed: int = 0) -> None:
        """All attention workers step at the same time; every layer is right, to the bit."""
        found = await asyncio.gather(
            *(self.step(worker, count, seed) for worker, count in enumerate(rows))
        )
        for worker, count in enumerate(rows):
            for got, expected in zip(
                found[worker], await self.expected(worker, count, seed), strict=True
            ):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            for got, directly in zip(
                found[worker], await self.direct(worker, count, seed), strict=True
            ):
                assert torch.equal(got, directly)

    async def meet_up(self, rows: Sequence[int] = (4, 4)) -> None:
        """Step until the first two attention workers wait for each other."""
        waits = self.attention[0].two_phase.waits
        for _ in range(50):
            await asyncio.gather(self.step(0, rows[0]), self.step(1, rows[1]))
            if waits.regulars == {"attention-0", "attention-1"}:
                return
        raise AssertionError(f"only {waits.regulars} meet")

    async def close(self) -> None:
        for worker in self.attention:
            await worker.dispatcher.close()
            await worker.network.close()
        for expert in self.experts:
            await expert.relay.close()
            await expert.network.close()


OpenLab = Callable[..., AbstractAsyncContextManager[Lab]]


@pytest.fixture
def open_lab(tiny_model: Any) -> OpenLab:
    """A lab with its placement in force and all links made, unless it is not ``placed``."""

    @asynccontextmanager
    async def opened(
        kind: str,
        attention_nodes: Sequence[str],
        expert_nodes: Sequence[str],
        mode: Mode,
        *,
        placed: bool = True,
        **options: Any,
    ) -> AsyncIterator[Lab]:
        lab = Lab(tiny_model, kind, attention_nodes, expert_nodes, mode, **options)
        try:
            await lab.open()
            if placed:
                lab.place()
                await lab.linked()
            yield lab
        finally:
            await lab.close()

    return opened


def offer_again(worker: Attention) -> None:
    """Let a worker offer its rows again, though nobody joined them."""
    now_s = asyncio.get_running_loop().time()
    worker.two_phase.steps.heed(JoinReply("offer"), now_s)


def await_at_first_layers(waits: RoundWaits, workers: Iterable[str]) -> None:
    """Have rounds wait for these workers at the first layer of steps."""
    for worker_id in workers:
        waits.came(worker_id, 0.0, first=True, last=False)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead is waited for as long as a busy machine may need."""
    for name in ("_UNKNOWN_S", "_FIRST_S", "_LEAST_S"):
        monkeypatch.setattr(f"moesaic.dispatch.two_phase.joining.{name}", 60.0)
