"""The promises of ``moesaic.services.attention.modes.contract``: a class of tests that every mode passes.

Each mode is opened as ``services.attention.main`` opens it: after its plan, in processes that have
joined a cluster on a real Redis, with real networks. All of them are in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.brownout.split import Level
from moesaic.cluster.background import background
from moesaic.cluster.lifecycle import StopEvent
from moesaic.cluster.placement_view import POINTER, STREAM, document
from moesaic.cluster.service import Identity, Process, service
from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.dispatch.two_phase.relay import ExpertRelay
from moesaic.engine.sequences.requests import (
    Event,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    TokenEvent,
)
from moesaic.engine.thread import engine_thread
from moesaic.errors import InvalidInput
from moesaic.experts.host import ExpertHost
from moesaic.experts.pull.ranges import Share
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.placement import PlacementHint
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.digest import digesting
from moesaic.models.weights.served import with_own_dtype
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.engine import RunningEngine, open_engine, record_of
from moesaic.services.attention.loading import find_model, load_worker
from moesaic.services.attention.modes.contract import Mode, WorkerParts
from moesaic.services.attention.modes.table import MODES
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.expert.weights import give_experts
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.opening import open_network
from tests.redis_servers import RedisServers
from tests.waiting import until

CPU = torch.device("cpu")
PAIRS = Substitution(way=2, instead="united")


@dataclass
class OpenWorker:
    """A mode that is open in a worker, with its engine."""

    parts: WorkerParts
    mode: Mode
    engine: RunningEngine
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    slowdown: float = 0.0

    async def run(self, work: Any) -> Any:
        """Await ``work`` on the engine's thread, where dispatchers live."""
        return await self.parts.thread.run(work)

    async def computes(self) -> bool:
        """True if a step that begins now needs to wait for nobody."""

        async def waits_for_nobody() -> bool:
            return not self.mode.dispatcher.waiting_for

        return bool(await self.run(waits_for_nobody()))

    async def answer(self, prompt: list[int], count: int) -> list[int]:
        """Have the engine generate so many tokens."""
        task = GenerationTask(max_tokens=count)
        self.engine.submit(Request(RequestKey("a"), tuple(prompt), task))
        tokens = []
        while not isinstance(event := await self.events.get(), FinishEvent):
            assert isinstance(event, TokenEvent), event
            tokens.append(event.token_id)
        return tokens


@asynccontextmanager
async def joined(
    redis_url: str, model: Any, worker_id: str, how: Mapping[str, Any]
) -> AsyncIterator[OpenWorker]:
    """A worker as ``services.attention.main`` builds it, up to the place where others find it."""
    settings = AttentionSettings(
        model=str(model.directory), redis_url=redis_url, worker_id=worker_id, **how
    )
    config, checkpoint = find_model(settings)
    settings = with_own_dtype(settings, config)
    open_mode = await on_own_thread(MODES[settings.dispatch], settings, config)
    task = asyncio.current_task()
    assert task is not None
    identity, events = Identity("attention", worker_id), asyncio.Queue[Event]()

    def emit(told: list[Event]) -> None:
        for event in told:
            events.put_nowait(event)

    async with (
        digesting(checkpoint.files) as digest,
        service(settings, identity, lambda _: None, StopEvent(task)) as process,
    ):
        parts = await load_worker(process, config, checkpoint, digest)
        mode = await open_mode(parts)
        engine = await open_engine(parts, mode, emit, lambda stored, evicted: None)
        await process.registered("ready", **record_of(parts, mode, engine))
        yield OpenWorker(parts, mode, engine, events)


async def place_experts(process: Process[AttentionSettings], parts: WorkerParts) -> None:
    """Have an expert worker on another node hold all experts, and put its placement in force."""
    config, worker_id = parts.config, "expert-0"
    num_united = PAIRS.num_united(config.moe.num_experts)
    settings = process.settings.model_copy(update={"worker_id": worker_id})
    num_experts, layers = config.moe.num_experts + num_united, list(config.moe_layers)
    host = await on_own_thread(
        ExpertHost, parts.checkpoint, config, worker_id, num_experts, parts.dtype, CPU
    )
    thread = await process.enter(engine_thread(CPU, "experts"))
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    opening = open_network(settings, "expert", config.digest, limits, thread.run)
    network = await process.enter(opening)
    relay = await thread.build(
        ExpertRelay, worker_id, network.network, host.answers.answer, host.epochs.placement
    )
    process.parts.push_async_callback(lambda: thread.run(relay.close()))
    address = await network.listen(0, relay.answer)
    weights_address, _ = await give_experts(settings, 0, config, host, process.parts)
    placed = placed_worker(worker_id, address, weights_address=weights_address, node="far")
    placement = placement_of(
        [placed],
        [list(range(num_experts))],
        layers,
        num_experts,
        model_digest=config.digest,
        substitution=PAIRS,
        num_united=num_united,
    )
    await on_own_thread(host.loader.prepare, placement)
    host.epochs.commit(1)
    bus = process.bus
    written = {POINTER: b"1", document(1): bus.sealed(document(1), placement)}
    assert await bus.compare_and_set({POINTER: None}, written)
    await bus.append(STREAM, PlacementHint(epoch=1))


@asynccontextmanager
async def serving(
    redis_url: str, model: Any, hows: list[Mapping[str, Any]], placed: bool
) -> AsyncIterator[list[OpenWorker]]:
    """A worker of each of ``hows``, once all of them compute."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(joined(redis_url, model, f"attention-{n}", how))
            for n, how in enumerate(hows)
        ]
        if placed:
            await place_experts(workers[0].parts.process, workers[0].parts)
        starting = [worker.mode.start() for worker in workers]
        for worker, slowdown in zip(workers, await asyncio.gather(*starting), strict=True):
            worker.slowdown = slowdown
            await stack.enter_async_context(background(worker.engine.run(), "engine"))
            await until(worker.computes)
        yield workers


class ModeContract:
    """Every mode.

    Attributes:
        dispatch: the value of ``--dispatch``.
        hows: further settings of the workers that compute together.
        placed: an expert worker has the experts.
        listens: other workers reach it.
        refused: settings that cannot work, each with a part of what people are told.
    """

    dispatch: ClassVar[str]
    hows: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    placed: ClassVar[bool] = False
    listens: ClassVar[bool] = False
    refused: ClassVar[tuple[tuple[dict[str, Any], str], ...]]

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    @classmethod
    def settings(cls) -> tuple[list[Mapping[str, Any]], bool]:
        """What ``serving`` takes."""
        return [{"dispatch": cls.dispatch, **how} for how in cls.hows], cls.placed

    @pytest_asyncio.fixture(loop_scope="class", scope="class")
    @classmethod
    async def opened(
        cls, tiny_model: Any, redis_servers: RedisServers
    ) -> AsyncIterator[list[OpenWorker]]:
        """The workers, which one task opens and closes."""
        ready: asyncio.Future[list[OpenWorker]] = asyncio.get_running_loop().create_future()
        leave = asyncio.Event()

        async def hold() -> None:
            with redis_servers.lent() as redis:
                async with serving(redis.url, tiny_model, *cls.settings()) as workers:
                    ready.set_result(workers)
                    await leave.wait()

        holding = asyncio.create_task(hold())
        await asyncio.wait({holding, ready}, return_when=asyncio.FIRST_COMPLETED)
        if holding.done():
            await holding
        yield ready.result()
        leave.set()
        await holding

    async def test_answers_are_those_of_the_model(
        self, tiny_model: Any, opened: list[OpenWorker]
    ) -> None:
        for seed, worker in enumerate(opened):
            prompt = torch.randint(2, 160, (40,), generator=torch.Generator().manual_seed(seed))

            told = await worker.answer(prompt.tolist(), 6)

            assert told == tiny_model.greedy(prompt.tolist(), 6)

    async def test_the_share_that_others_have_from_here_is_told(
        self, opened: list[OpenWorker]
    ) -> None:
        shares = [how.get("share", "") for how in self.hows]
        told = [worker.mode.share for worker in opened]

        assert told == (shares if len(opened) > 1 else [""])
        assert all(Share.parse(share).count == len(opened) for share in told if share)

    async def test_made_up_steps_are_computed_without_other_workers(
        self, opened: list[OpenWorker]
    ) -> None:
        worker = opened[0]
        hidden = torch.randn(3, worker.parts.config.hidden_size)

        async def compute() -> torch.Tensor:
            return await worker.mode.experts(worker.parts.config.moe_layers[0], hidden)

        made_up = await worker.run(compute())

        assert made_up.shape == hidden.shape
        assert made_up.dtype == hidden.dtype

    async def test_steps_have_the_substitution_that_was_adopted_or_placed(
        self, opened: list[OpenWorker]
    ) -> None:
        worker = opened[0]
        degrading, dispatcher = worker.mode.degrading, worker.mode.dispatcher

        async def substitution() -> Substitution | None:
            step = dispatcher.begin_step()
            dispatcher.end_step(step)
            return step.substitution

        async def substitution_after(loaded: LoadedSubstitution | None) -> Substitution | None:
            assert degrading is not None
            degrading.adopt(loaded)
            return await substitution()

        if degrading is None:
            assert await worker.run(substitution()) == (PAIRS if self.placed else None)
            return
        loaded = await on_own_thread(degrading.substitutions.load, PAIRS)
        assert await worker.run(substitution_after(loaded)) == PAIRS
        assert await worker.run(substitution_after(None)) is None

    async def test_made_up_rows_are_degraded_as_those_of_steps_behind_them(
        self, opened: list[OpenWorker]
    ) -> None:
        worker = opened[0]
        degrading, dispatcher = worker.mode.degrading, worker.mode.dispatcher
        if degrading is None:
            return
        config = worker.parts.config
        layer, hidden = config.moe_layers[0], torch.randn(5, config.hidden_size)
        loaded = await on_own_thread(degrading.substitutions.load, PAIRS)
        made_up, real = (PromisedRows([Level(0.0)], [0] * 5) for _ in range(2))

        async def degraded() -> torch.Tensor:
            degrading.adopt(loaded)
            step = dispatcher.begin_step()
            try:
                return await dispatcher.dispatch(step, layer, hidden, real)
            finally:
                dispatcher.end_step(step)

        with torch.inference_mode():
            found = await on_own_thread(degrading.degraded, loaded, hidden, made_up)

        torch.testing.assert_close(found, await worker.run(degraded()))
        assert made_up.settle().tolist() == real.settle().tolist()
        assert made_up.settle().any()

    async def test_transfers_make_no_step_shorter(self, opened: list[OpenWorker]) -> None:
        assert all(worker.slowdown == 0 or worker.slowdown >= 1 for worker in opened)

    async def test_others_reach_it_where_it_says_until_it_ends(
        self, tiny_model: Any, redis_servers: RedisServers
    ) -> None:
        with redis_servers.lent() as redis:
            async with serving(redis.url, tiny_model, *self.settings()) as workers:
                addresses = [worker.mode.data_address for worker in workers]
                assert all(map(bool, addresses)) == any(map(bool, addresses)) == self.listens
                assert all([await answers_at(address) for address in addresses if address])
            assert not any([await answers_at(address) for address in addresses if address])

    async def test_settings_that_cannot_work_are_refused_before_anything_is_opened(
        self, tiny_model: Any
    ) -> None:
        directory = tiny_model.directory

        def plan(**given: Any) -> object:
            settings = AttentionSettings(model=str(directory), dispatch=self.dispatch, **given)
            return MODES[settings.dispatch](settings, load_config(directory))

        how = self.hows[0]
        assert callable(await on_own_thread(partial(plan, **how)))
        for more, told in self.refused:
            with pytest.raises((InvalidInput, ValidationError), match=told):
                await on_own_thread(partial(plan, **how | more))


async def answers_at(address: str) -> bool:
    """True if somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True
