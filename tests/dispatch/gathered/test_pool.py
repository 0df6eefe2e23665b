"""Experts that come from the slots of expert workers give the same bits, whatever the placement and whoever is lost."""

import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from benchmarks.parity.cases import ParityCase, build_reference
from moesaic.dispatch.gathered.assembly import GatheredParts, assemble
from moesaic.dispatch.gathered.holders import PlacedHolders
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.gathered.plan import plan_gather
from moesaic.dispatch.local import LocalDispatcher
from moesaic.errors import ExpertUnavailable
from moesaic.experts import pieces
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.packed import PackedExperts
from moesaic.experts.pull.frames import PULL_LIMITS, contents_digest
from moesaic.experts.pull.ranges import PULL_BYTES, Share, rows_of
from moesaic.experts.pull.server import PullServer
from moesaic.experts.pull.shard import SlotShard
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.inprocess import Hub, InProcessNetwork
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import CPU, FP32, NUM_EXPERTS

HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
OVERLAPPING = [[0, 1, 2, 3, 4, 5], [6, 2, 7, 3, 4, 5]]
Slots = Sequence[Sequence[int]]


@dataclass
class Pool:
    """Expert hosts that give, and one worker that gathers from them.

    Attributes:
        answers: what each host serves pulls by, from now on.
    """

    directory: Path
    hosts: list[ExpertHost] = field(default_factory=list)
    networks: list[InProcessNetwork] = field(default_factory=list)
    answers: list[Handler] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    worker: GatheredParts | None = None

    def place(self, epoch: int, slots: Slots) -> Placement:
        """Put the same experts into the slots of every layer, and tell everybody; with fewer slots,
        the last workers are not placed."""
        config, hosts = load_config(self.directory), self.hosts[: len(slots)]
        placement = Placement(
            epoch=epoch,
            model_digest=config.digest,
            num_experts=NUM_EXPERTS,
            workers=[
                PlacedWorker(
                    worker_id=f"expert-{n}",
                    generation=1,
                    admin_address="",
                    data_address="",
                    weights_address=address,
                )
                for n, address in enumerate(self.addresses[: len(slots)])
            ],
            layers=list(config.moe_layers),
            slots=[[list(each) for each in slots] for _ in config.moe_layers],
        )
        for host in hosts:
            host.prepare(placement)
            host.epochs.commit(epoch)
        self.holders.set_placement(placement)
        return placement

    @property
    def holders(self) -> PlacedHolders:
        """Whom the worker asks."""
        assert self.worker is not None
        assert isinstance(self.worker.holders, PlacedHolders)
        return self.worker.holders

    async def steps(self, count: int = 2) -> None:
        """Run steps; every layer must give the very bits of the local dispatcher."""
        for number in range(count):
            await self.opened().step(9 + number)

    def opened(self) -> contract.Opened:
        """The worker's dispatcher."""
        config, checkpoint = load_config(self.directory), Checkpoint(self.directory)
        local = LocalDispatcher(checkpoint, config, FP32, CPU)
        assert self.worker is not None
        return contract.Opened(self.worker.dispatcher, local, config, has_bits=True)


def giver(config: ModelConfig, layout: ExpertLayout, find: Any) -> PullServer:
    """Give experts that ``find`` finds in slots."""
    digest = contents_digest(config.digest, layout, Share())
    shard = SlotShard(find, layout.nbytes)
    return PullServer(config.moe_layers, NUM_EXPERTS * layout.nbytes, shard, digest)


@pytest.fixture(scope="session")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers with eight experts each."""
    directory = tmp_path_factory.mktemp("five")
    build_reference(ParityCase("qwen3_moe", "five layers", {"num_hidden_layers": 5}), directory)
    return directory


@pytest.fixture
def pool(five_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a pool of two expert workers; an async context manager. Even small experts take several pulls."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 13)

    async def here(work: Any) -> Any:
        return await work

    @asynccontextmanager
    async def made(slots: Slots, *, quantization: Any = "none") -> AsyncIterator[Pool]:
        config, checkpoint = load_config(five_layers), Checkpoint(five_layers)
        size = config.moe.expert_size
        layout = ExpertLayout(config.hidden_size, size, FP32)
        plan = plan_gather(
            config.moe_layers,
            NUM_EXPERTS,
            layout.nbytes,
            share=Share(),
            offload=True,
            window=1,
            pool=True,
        )
        hub, found = Hub(), Pool(five_layers)
        client = InProcessNetwork("attention-0", b"secret", PULL_LIMITS, hub)
        given_as = ExpertLayout(config.hidden_size, size, FP32, quantization)
        for idx in range(2):
            name = f"expert-{idx}"
            host = ExpertHost(checkpoint, config, name, NUM_EXPERTS, FP32, CPU, quantization)
            found.answers.append(giver(config, given_as, host.epochs.held).answer)
            network = InProcessNetwork(name, b"secret", PULL_LIMITS, hub)

            def answer(request: Frame, idx: int = idx) -> Any:
                return found.answers[idx](request)

            found.addresses.append(await network.listen("memory", 0, answer))
            found.hosts.append(host)
            found.networks.append(network)
        async with assemble(
            plan,
            PackedExperts(checkpoint, config, layout),
            load_gates(checkpoint, config, FP32, CPU),
            here,
            model_digest=config.digest,
            directory=tmp_path / "offloaded",
            network=client,
        ) as found.worker:
            found.place(1, slots)
            await found.holders.complete()
            found.worker.dispatcher.prime()
            yield found
        for network in (client, *found.networks):
            await network.close()

    return made


class TestGatheredFromSlots(contract.DispatcherContract, contract.OwnStepsContract):
    @pytest.fixture
    async def opened(self, pool: Any) -> AsyncIterator[contract.Opened]:
        async with pool(OVERLAPPING) as found:
            yield found.opened()


def gathered_from(*sources: str) -> float:
    name = "moesaic_gather_fetched_bytes_total"
    return sum(REGISTRY.get_sample_value(name, {"source": s}) or 0 for s in sources)


@pytest.mark.parametrize("slots", [HALVES, OVERLAPPING], ids=str)
async def test_all_experts_come_from_slots_whatever_the_placement(pool: Any, slots: Slots) -> None:
    before = [gathered_from("expert-0"), gathered_from("expert-1")]
    elsewhere = gathered_from("file", "checkpoint")

    async with pool(slots) as found:
        await found.steps()

    assert gathered_from("expert-0") > before[0]
    assert gathered_from("expert-1") > before[1]
    assert gathered_from("file", "checkpoint") == elsewhere


async def test_a_new_placement_is_followed_between_two_layers(pool: Any) -> None:
    async with pool(HALVES) as found:
        await found.steps()
        found.place(2, [HALVES[1], HALVES[0]])
        await found.steps()


async def test_links_are_kept_to_those_who_are_placed(pool: Any) -> None:
    async with pool(HALVES) as found:
        await found.steps()
        found.place(2, [[*range(NUM_EXPERTS)]])
        await found.networks[1].all_left()
        elsewhere = gathered_from("file", "checkpoint")

        await found.steps()

        assert gathered_from("file", "checkpoint") == elsewhere
        found.place(3, HALVES)
        await found.holders.complete()
        assert found.networks[1].served_peers


async def test_what_a_lost_worker_had_comes_from_its_replica_or_the_file(pool: Any) -> None:
    async with pool(OVERLAPPING) as found:
        await found.steps()
        from_file = gathered_from("file")

        await found.networks[1].close()
        await found.steps(3)

        assert found.holders.missing == [Share()]
        assert gathered_from("file") > from_file  # experts 6 and 7 had no other holder


async def test_an_expert_that_has_left_its_slot_comes_from_elsewhere(pool: Any) -> None:
    async with pool(HALVES) as found:
        config = load_config(found.directory)
        layout = ExpertLayout(config.hidden_size, config.moe.expert_size, FP32)
        # It forgot all, and nobody has been told.
        found.answers[0] = giver(config, layout, lambda layer, expert: None).answer
        before = gathered_from("checkpoint", "file")
        await found.steps()

        assert gathered_from("checkpoint", "file") > before
        assert found.holders.missing == []  # it is asked again


async def test_workers_with_other_bytes_are_refused(pool: Any) -> None:
    before = gathered_from("expert-0", "expert-1")

    async with pool(HALVES, quantization="int8") as found:
        await found.steps()

    assert gathered_from("expert-0", "expert-1") == before


@pytest.mark.parametrize("slots", [HALVES, OVERLAPPING], ids=str)
async def test_a_damaged_expert_in_a_slot_is_made_up_for(pool: Any, slots: Slots) -> None:
    name = "moesaic_gather_damaged_pulls_total"
    before = REGISTRY.get_sample_value(name) or 0.0
    async with pool(slots) as found:
        expert = found.hosts[0].epochs.held(2, 2)
        assert expert is not None
        expert.packed[-1] ^= 64  # since it was loaded

        await found.steps()  # to the same bits as from the checkpoint

    assert REGISTRY.get_sample_value(name) == before + 1


async def test_a_slot_that_is_empty_is_a_typed_error(pool: Any) -> None:
    async with pool(HALVES) as found:
        config = load_config(found.directory)
        layout = ExpertLayout(config.hidden_size, config.moe.expert_size, FP32)
        digest = contents_digest(config.digest, layout, Share())
        start = torch.tensor([[7 * layout.nbytes, 64]])
        request = Frame(kind=FrameKind.REQUEST, layer=1, digest=digest, tensors=[start])

        with pytest.raises(ExpertUnavailable):
            await found.answers[0](request)


def loaded(packed: torch.Tensor, expert: int) -> LoadedExpert:
    """An expert of which only the bytes matter, and their digests."""
    digests = torch.tensor([100 * expert + n for n in range(pieces.num_pieces(len(packed)))])
    return LoadedExpert(mlp=None, packed=packed, digests=digests)  # type: ignore[arg-type]


@given(st.data())
def test_any_part_of_a_layer_reads_as_its_experts_were_packed(data: st.DataObject) -> None:
    row_bytes = data.draw(st.integers(1, 200))
    packed = torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8)
    shard = SlotShard(lambda _, expert: loaded(packed[expert], expert), row_bytes)
    start = data.draw(st.integers(0, packed.numel() - 1))
    length = data.draw(st.integers(1, packed.numel() - start))

    assert torch.equal(shard.read(0, start, length), packed.flatten()[start : start + length])


def test_reading_experts_leaves_no_threads_behind() -> None:
    rows = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    shard = SlotShard(lambda _, expert: loaded(rows[expert], expert), 1 << 20)

    def read() -> int:  # as the thread that gives experts does, which stays
        usual = torch.get_num_threads()
        torch.set_num_threads(4)
        try:
            before = len(os.listdir("/proc/self/task"))
            shard.read(0, 1 << 19, 1 << 20)
            return len(os.listdir("/proc/self/task")) - before
        finally:
            torch.set_num_threads(usual)

    with ThreadPoolExecutor(1) as giver:
        assert giver.submit(read).result() == 0


class Known:
    """Sources that are there; nothing is asked of them."""

    def __init__(self, workers: Sequence[str]) -> None:
        self.sources = {Peer(name, 1, "", Share()): name for name in workers}

    def usable(self) -> dict[Peer, Any]:
        return self.sources

    def set(self, peers: Sequence[Peer]) -> None:
        """Whoever is placed: it says itself who is there."""


@given(st.data())
def test_every_byte_is_asked_of_one_who_holds_it_or_of_nobody(data: st.DataObject) -> None:
    num_experts, row_bytes = data.draw(st.integers(1, 9)), 64 * data.draw(st.integers(1, 3000))
    experts = st.integers(-1, num_experts - 1)
    slots = data.draw(st.lists(st.lists(experts, max_size=6), min_size=1, max_size=4))
    names = [f"expert-{idx}" for idx in range(len(slots))]
    alive = data.draw(st.sets(st.sampled_from(names)))
    refused = data.draw(st.sets(st.sampled_from(names)))
    plan = plan_gather(
        (0, 1), num_experts, row_bytes, share=Share(), offload=True, window=1, pool=True
    )
    holders: Any = PlacedHolders(plan, Known(sorted(alive)))  # type: ignore[arg-type]
    workers = [
        PlacedWorker(worker_id=name, generation=1, admin_address="", data_address="")
        for name in names
    ]
    layers = {"layers": [0, 1], "slots": [slots, slots]}
    placed = Placement(epoch=1, model_digest="", num_experts=num_experts, workers=workers, **layers)
    holders.set_placement(placed)
    start = 64 * data.draw(st.integers(0, num_experts * row_bytes // 64 - 1))
    length = 64 * data.draw(st.integers(1, (num_experts * row_bytes - start) // 64))

    asked, nobody = holders.divide(Share(), 1, [(start, length)], refused)

    held = dict(zip(names, slots, strict=True))
    everything = [run for _, part in asked for run in part] + nobody
    assert sum(size for _, size in everything) == length
    ends = sorted((at, at + size) for at, size in everything)
    assert ends[0][0] == start
    assert all(end == begin for (_, end), (begin, _) in pairwise(ends))
    for name, part in asked:
        assert name in alive - refused
        assert all(size <= PULL_BYTES for _, size in part)
        assert set(rows_of(part, row_bytes)) <= set(held[name])
    for row in rows_of(nobody, row_bytes):
        assert not [name for name in alive - refused if row in held[name]]
