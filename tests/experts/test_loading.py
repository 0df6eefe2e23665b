"""Experts come from peers if any has them as they should be, else from the checkpoint."""

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common.inprocess import Hub, InProcessNetwork
from benchmarks.common.placements import placed_worker, placement_of
from moesaic.errors import ExpertUnavailable, InvalidInput, NotReady
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.pace import MOST_REST_S, LoadPace
from moesaic.experts.pull.frames import PULL_LIMITS, contents_digest
from moesaic.experts.pull.loader import ExpertPeers
from moesaic.experts.pull.ranges import PULL_BYTES, Share
from moesaic.experts.pull.server import PullServer
from moesaic.experts.pull.shard import SlotShard
from moesaic.experts.slots import LoadResult
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.telemetry.metrics import snapshot
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import until

CPU, FP32 = torch.device("cpu"), torch.float32
NUM_EXPERTS, LAYERS = 8, [0, 1, 2]


class Worker:
    """A host that gives its experts over a network, and how it reaches its peers."""

    def __init__(self, model: Any, name: str, hub: Hub) -> None:
        self.config = load_config(model.directory)
        checkpoint = Checkpoint(model.directory)
        self.host = ExpertHost(checkpoint, self.config, name, NUM_EXPERTS, FP32, CPU)
        layout = self.host.files.layout
        assert layout is not None
        self.layout, self.size = layout, layout.nbytes
        self.name, self.network = name, InProcessNetwork(name, b"secret", PULL_LIMITS, hub)
        self.peers = ExpertPeers(
            self.network, name, layout, self.config.digest, torch.device("cpu")
        )
        self.digest = contents_digest(self.config.digest, layout, Share())
        shard = SlotShard(self.host.epochs.held, self.size)
        holder = PullServer(self.config.moe_layers, NUM_EXPERTS * self.size, shard, self.digest)
        self.answer, self.address = holder.answer, ""

    async def listen(self) -> None:
        self.address = await self.network.listen("memory", 0, lambda frame: self.answer(frame))

    async def prepare(
        self, placement: Placement, serving: Placement, pace: LoadPace | None = None
    ) -> tuple[LoadResult, int]:
        """As the service does it, on a thread; also how many experts were pulled."""
        pace = pace or LoadPace()

        def load() -> tuple[LoadResult, int]:
            with closing(self.peers.pulling(serving, pace)) as pulling:
                bring = pulling.or_else(self.host.files.bring(pace))
                return self.host.loader.prepare(placement, bring, pace.num_threads), pulling.pulled

        return await asyncio.to_thread(load)


def placement(epoch: int, workers: list[Worker], *slots: list[int]) -> Placement:
    return placement_of(
        [placed_worker(worker.name, weights_address=worker.address) for worker in workers],
        slots,
        LAYERS,
        NUM_EXPERTS,
        epoch=epoch,
        model_digest=workers[0].config.digest,
    )


@asynccontextmanager
async def holding(model: Any, *slots: list[int]) -> AsyncIterator[tuple[list[Worker], Placement]]:
    """Workers that hold these experts of every layer, and their placement."""
    hub = Hub()
    workers = [Worker(model, name, hub) for name, _ in zip("abc", slots, strict=False)]
    for worker in workers:
        await worker.listen()
    serving = placement(1, workers, *slots)
    for worker in workers:
        worker.host.loader.prepare(serving)
        worker.host.epochs.commit(1)
    try:
        yield workers, serving
    finally:
        for worker in workers:
            await worker.network.close()


@asynccontextmanager
async def pair(model: Any) -> AsyncIterator[tuple[Worker, Worker, Placement]]:
    """A worker that holds experts 0 to 3, one that holds 4 to 7, and their placement."""
    async with holding(model, [0, 1, 2, 3], [4, 5, 6, 7]) as ([a, b], serving):
        yield a, b, serving


def held(worker: Worker, layer: int, expert: int) -> LoadedExpert:
    found = worker.host.epochs.held(layer, expert)
    assert found is not None
    assert found.packed is not None
    return found


async def test_experts_come_from_the_peer_that_holds_them_bit_for_bit(tiny_model: Any) -> None:
    async with pair(tiny_model) as (a, b, serving):
        after = placement(2, [a, b], [0, 1, 4, 5], [2, 3, 6, 7])

        result, pulled = await a.prepare(after, serving)

        assert (result.loaded, result.kept, pulled) == (6, 6, 6)
        for layer in LAYERS:
            for expert in (4, 5):
                assert torch.equal(held(a, layer, expert).packed, held(b, layer, expert).packed)
            for expert in (0, 1):  # what stays is shared, not copied
                newest, *_ = a.host.epochs.tables
                assert newest.layers[layer].loaded[expert] is held(a, layer, expert)
        assert b.network.served_peers == []  # links end with what they were for


async def test_pulled_experts_compute_what_experts_from_the_checkpoint_do(tiny_model: Any) -> None:
    async with pair(tiny_model) as (a, b, serving):
        await a.prepare(placement(2, [a, b], [4, 5, 6, 7], [0, 1, 2, 3]), serving)
        x = torch.randn(3, a.config.hidden_size, generator=torch.Generator().manual_seed(1))

        for layer in LAYERS:
            for expert in (4, 5, 6, 7):
                assert torch.equal(held(a, layer, expert).mlp(x), held(b, layer, expert).mlp(x))


async def test_a_damaged_expert_of_a_peer_is_not_taken(tiny_model: Any) -> None:
    async with pair(tiny_model) as (a, b, serving):
        right = held(b, 1, 5).packed.clone()
        held(b, 1, 5).packed[7] ^= 1  # in the peer's memory, since it was loaded
        name = 'moesaic_expert_pulls_total{outcome="damaged"}'
        before = snapshot().get(name, 0.0)

        result, pulled = await a.prepare(placement(2, [a, b], [4, 5], [0, 1]), serving)

        assert (result.loaded, pulled) == (6, 5)
        assert torch.equal(held(a, 1, 5).packed, right)
        assert snapshot()[name] == before + 1


async def test_a_peer_that_is_gone_is_asked_once_and_the_checkpoint_read(tiny_model: Any) -> None:
    async with pair(tiny_model) as (a, b, serving):
        await b.network.close()

        result, pulled = await a.prepare(placement(2, [a, b], [4, 5], [0, 1]), serving)

        assert (result.loaded, pulled) == (6, 0)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """No garbage is collected; it may come to that late, and what nobody has must be free before."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_a_peer_that_hangs_does_not_keep_the_experts_of_an_epoch_that_is_gone(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.experts.pull.loader.DIAL_TIMEOUT_S", 0.1)
    monkeypatch.setattr("moesaic.experts.epochs.RETIRE_AFTER_S", 0.0)
    async with pair(tiny_model) as (a, b, _):
        with socket.create_server(("127.0.0.1", 0)) as silent:  # as one of a stopped process
            b.address = f"127.0.0.1:{silent.getsockname()[1]}"
            network = UcxNetwork("a", "expert", b"secret", PULL_LIMITS, "tcp")
            a.peers = ExpertPeers(network, "a", a.layout, a.config.digest, CPU)
            serving = placement(1, [a, b], [0, 1, 2, 3], [4, 5, 6, 7])
            on_one_thread = LoadPace(0.99)  # then the frames of pulls go back to those that prepare
            after = placement(2, [a, b], [4, 5], [0, 1])
            result, pulled = await a.prepare(after, serving, on_one_thread)
            await network.close()
        a.host.epochs.commit(2)
        a.host.retire()

        assert (result.loaded, pulled) == (6, 0)
        assert a.host.epochs.resident_bytes == 6 * a.size


@pytest.mark.usefixtures("no_collections")
async def test_garbage_is_collected_before_experts_are_refused_for_want_of_memory(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.experts.epochs.RETIRE_AFTER_S", 0.0)
    async with pair(tiny_model) as (a, b, _):
        host = a.host
        host.loader.max_expert_bytes = 12 * a.size
        table = SimpleNamespace(held=host.epochs.tables[0])
        table.itself = table
        del table
        host.loader.prepare(placement(2, [a, b], [], list(range(NUM_EXPERTS))))
        host.epochs.commit(2)
        host.retire()
        assert host.epochs.resident_bytes == 12 * a.size

        host.loader.prepare(placement(3, [a, b], [4, 5], list(range(NUM_EXPERTS))))

        assert host.epochs.resident_bytes == 6 * a.size


@pytest.fixture
def several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small experts take several."""
    monkeypatch.setattr("moesaic.experts.pieces.PIECE_BYTES", 1 << 11)


@pytest.mark.usefixtures("several_messages")
async def test_what_a_peer_was_giving_when_it_died_comes_from_another_replica(
    tiny_model: Any,
) -> None:
    everything = list(range(NUM_EXPERTS))
    async with holding(tiny_model, [], everything, everything) as ([a, b, c], serving):
        dying: list[asyncio.Task[None]] = []

        async def die(request: Frame) -> Frame:
            dying.append(asyncio.create_task(b.network.close()))
            return await asyncio.Future()

        whole, asked = b.answer, [0]

        async def give_a_little(request: Frame) -> Frame:
            asked[0] += 1
            return await (whole if asked[0] < 6 else die)(request)

        b.answer = give_a_little  # type: ignore[assignment]
        after = placement(2, [a, b, c], everything, everything, everything)
        result, pulled = await a.prepare(after, serving)
        await asyncio.gather(*dying)

        assert asked == [6]
        assert result.loaded == pulled == len(LAYERS) * NUM_EXPERTS
        for layer in LAYERS:
            for expert in everything:
                assert torch.equal(held(a, layer, expert).packed, held(c, layer, expert).packed)


async def test_a_peer_that_lacks_one_expert_is_asked_for_its_others(tiny_model: Any) -> None:
    async with holding(tiny_model, [0, 1, 2, 3], [4, 5, 6, 7], []) as ([a, b, c], _):
        told = placement(1, [a, b, c], [0, 1, 2, 3, 4], [4, 5, 6, 7], [])  # of a more than it has

        everything = list(range(NUM_EXPERTS))
        result, pulled = await c.prepare(placement(2, [c], everything), told)

        assert result.loaded == pulled == len(LAYERS) * NUM_EXPERTS


async def test_answers_of_another_type_are_not_taken(tiny_model: Any) -> None:
    async with pair(tiny_model) as (a, b, serving):
        right = b.answer

        async def doubled(request: Frame) -> Frame:
            reply = await right(request)
            reply.tensors = [reply.tensors[0].long()]
            return reply

        b.answer = doubled  # type: ignore[assignment]
        result, pulled = await a.prepare(placement(2, [a, b], [4, 5], [0, 1]), serving)

        assert (result.loaded, pulled) == (6, 0)


async def test_only_who_means_the_same_bytes_gets_them(tiny_model: Any) -> None:
    async with pair(tiny_model) as (_, b, _):

        def pull(layer: int = 1, expert: int = 5, start: int = 0, length: int = 64) -> Frame:
            where = torch.tensor([[expert * b.size + start, length]])
            return Frame(kind=FrameKind.REQUEST, layer=layer, digest=b.digest, tensors=[where])

        for layer in LAYERS:
            whole = await b.answer(pull(layer, length=b.size))
            assert torch.equal(whole.tensors[1][0], held(b, layer, 5).digests)
        of_two = await b.answer(pull(start=b.size - 32))
        assert of_two.tensors[1].numel() == 0  # it is whole pieces of neither
        with pytest.raises(ExpertUnavailable):
            await b.answer(pull(expert=1))  # not here
        foreign, shapeless = pull(), pull()
        foreign.digest ^= 1
        shapeless.tensors = []
        wrong = [
            pull(expert=-1),
            pull(expert=99),
            pull(layer=9),
            pull(start=1),
            pull(length=0),
            pull(expert=7, length=b.size + 64),
            pull(length=PULL_BYTES + 64),
        ]
        for request in (*wrong, foreign, shapeless):
            with pytest.raises(InvalidInput):
                await b.answer(request)


async def test_pulling_can_be_ended_while_it_rests(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.experts.pace.MOST_REST_S", 3600.0)
    async with pair(tiny_model) as (a, b, serving):
        pace = LoadPace(1e-9)  # a message is followed by the longest rest
        name = "moesaic_gather_served_bytes_total"
        before = snapshot().get(name, 0.0)
        after = placement(2, [a, b], [4, 5], [0, 1])

        loading = asyncio.create_task(a.prepare(after, serving, pace))
        await until(lambda: snapshot().get(name, 0.0) > before)
        pace.cancel()

        with pytest.raises(NotReady):
            await loading
        assert a.host.epochs.held(0, 4) is None


async def test_loading_can_be_ended_at_any_moment(tiny_model: Any) -> None:
    async with pair(tiny_model) as (a, _, _):
        pace = LoadPace(0.001)  # would rest for a thousand times as long as it reads
        begun = threading.Event()
        bring = a.host.files.bring(pace)

        def slowly(layer: int, expert: int) -> LoadedExpert:
            begun.set()
            return bring(layer, expert)

        after = placement(2, [a], list(range(NUM_EXPERTS)))
        loading = asyncio.create_task(asyncio.to_thread(a.host.loader.prepare, after, slowly))
        await asyncio.to_thread(begun.wait)
        pace.cancel()

        with pytest.raises(NotReady):
            await loading
        assert a.host.epochs.held(0, 7) is None


def test_rest_is_bounded_and_comes_only_before_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float | None] = []
    now_s = iter([0.0, 0.01, 1.0, 101.0, 200.0, 200.1])
    monkeypatch.setattr("moesaic.experts.pace.time", SimpleNamespace(monotonic=lambda: next(now_s)))
    never_set = SimpleNamespace(wait=rests.append, is_set=lambda: False)
    made = SimpleNamespace(Event=lambda: never_set)
    monkeypatch.setattr("moesaic.experts.pace.threading", made)
    pace, taken = LoadPace(0.1), []
    for _ in range(3):
        with pace.working():
            taken.append(list(rests))

    assert taken == [[], [pytest.approx(0.09)], [pytest.approx(0.09), MOST_REST_S]]
    assert len(rests) == 2, "the last work was followed by a rest"


def test_a_share_must_be_one() -> None:
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidInput):
            LoadPace(share)
