"""Streams of commands and events, on a real engine."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.engine import Engine
from moesaic.engine.load import EngineLoad, Outstanding
from moesaic.engine.sequences.grammar import GrammarCompiler
from moesaic.engine.sequences.requests import Event
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.thread import engine_thread
from moesaic.kernels.promised import PromisedRows
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.prefix.blocks import BlockHasher
from moesaic.services.attention import observing, streams
from moesaic.services.attention.admin import AttentionAdmin
from moesaic.services.attention.engine import RunningEngine
from moesaic.services.attention.observing import Vitals, observe
from moesaic.v1 import attention_pb2 as pb
from tests.waiting import HANG_S, until

LIMITS = EngineLimits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_num_queued_reqs=64,
    max_num_queued_tokens=4096,
    max_model_len=512,
)


@asynccontextmanager
async def serving(
    model: Any, dispatcher: type[LocalDispatcher] = LocalDispatcher, *, observed: bool = False
) -> AsyncIterator[AttentionAdmin]:
    """A service with its engine on a thread of its own, as a worker has them."""
    config, checkpoint = load_config(model.directory), Checkpoint(model.directory)
    how = (checkpoint, config, torch.float32, torch.device("cpu"))
    service, main_loop = AttentionAdmin(config, model.directory), asyncio.get_running_loop()

    def emit(events: list[Event]) -> None:
        main_loop.call_soon_threadsafe(service.requests.deliver, events)

    def tell_blocks(stored: list[bytes], evicted: list[bytes]) -> None:
        main_loop.call_soon_threadsafe(service.streams.change_blocks, stored, evicted)

    async def opened() -> Engine:
        hasher = BlockHasher(b"secret", "tiny", 16)
        engine = Decoder.load(*how), dispatcher(*how), LIMITS, 64, emit, 5.0
        return Engine(*engine, hasher, tell_blocks)

    async with engine_thread(torch.device("cpu")) as thread:
        engine = await thread.run(opened())
        profile = pb.EngineProfile(max_step_tokens=64)
        running_engine = RunningEngine(engine, thread)
        service.attach(config, running_engine, profile, lambda: load_gates(*how))
        running = asyncio.create_task(running_engine.run())
        status = ServiceStatus("attention", "test", 0)
        watching = asyncio.create_task(
            observe(service, status, running_engine) if observed else asyncio.sleep(0)
        )
        yield service
        watching.cancel()
        running.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
        service.detach()


async def commands(*submits: pb.Submit) -> AsyncIterator[pb.ExecuteRequest]:
    for submit in submits:
        yield pb.ExecuteRequest(submit=submit)
    await asyncio.Event().wait()


async def told(service: AttentionAdmin, asked: AsyncIterator[pb.ExecuteRequest]) -> Any:
    """The responses of a stream one by one, however many came in one message."""
    stream: Any = service.Execute(asked, Any)
    try:
        async for response in stream:
            for one in response.together or [response]:
                yield one
    finally:
        await stream.aclose()


def long_answer(request_id: str) -> pb.Submit:
    generation = pb.Generation(max_tokens=400, ignore_eos=True)
    return pb.Submit(request_id=request_id, token_ids=[5, 6], generation=generation)


async def test_a_stream_that_nobody_reads_is_ended_and_its_requests_with_it(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_QUEUED_EVENTS", 200)
    async with serving(tiny_model) as service:
        stream = told(service, commands(long_answer("a"), long_answer("b")))
        await anext(stream)
        assert len(service.requests) == 2
        await service.requests.idle.wait()

        rest = [response async for response in stream]
        assert all(response.WhichOneof("event") == "tokens" for response in rest)
        assert len(rest) <= 400  # what waited, and what the first message held


class Stopping(LocalDispatcher):
    """Experts of which the first layer takes as long as they are told; the engine's thread waits."""

    going = threading.Event()
    begun = threading.Event()

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.going.clear()
        self.begun.clear()

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        self.begun.set()
        assert self.going.wait(HANG_S)
        return await super().dispatch(step, layer, hidden_states, promised)


async def test_a_stream_that_waits_for_an_answer_gets_signs_of_life(tiny_model: Any) -> None:
    async with serving(tiny_model, Stopping) as service:
        service.beat()  # nobody waits
        stream = told(service, commands(long_answer("a")))
        reading = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(Stopping.begun.wait, HANG_S)
        service.beat()
        service.beat()
        Stopping.going.set()
        following = [await reading, await anext(stream)]
        await stream.aclose()

    assert [response.WhichOneof("event") for response in following] == [None, "tokens"]


@pytest.mark.parametrize("stuck_s", [HANG_S, 0.0])
async def test_a_step_that_takes_long_shows_life_until_it_is_stuck(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, stuck_s: float
) -> None:
    monkeypatch.setattr(observing, "STUCK_S", stuck_s)
    live, looks = Vitals.live, list[int]()

    def looked(seen: Vitals, count: int) -> bool:
        looks.append(count)
        return live(seen, count)

    monkeypatch.setattr(Vitals, "live", looked)
    async with serving(tiny_model, Stopping, observed=True) as service:
        stream: Any = service.Execute(commands(long_answer("a")), Any)
        first = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(Stopping.begun.wait, HANG_S)
        await until(lambda: looks)
        while first.done():  # news of before the step
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
        num_looks = len(looks)
        await until(lambda: len(looks) > num_looks + 1)
        told_meanwhile = first.done()
        Stopping.going.set()
        await first
        await stream.aclose()

    assert told_meanwhile == (stuck_s > 0)


async def test_without_an_engine_requests_are_refused_for_others_to_take(tiny_model: Any) -> None:
    async with serving(tiny_model) as service:
        pass

    stream = told(service, commands(long_answer("late")))
    response = await anext(stream)
    await stream.aclose()

    assert (response.failure.code, response.failure.retryable) == ("not_ready", True)


async def watching(*submits: pb.Submit) -> AsyncIterator[pb.ExecuteRequest]:
    yield pb.ExecuteRequest(watch_blocks=pb.WatchBlocks())
    async for command in commands(*submits):
        yield command


async def test_every_stream_that_watches_is_told_of_all_blocks_and_of_its_own_prompts(
    tiny_model: Any,
) -> None:
    scoring = pb.Scoring(candidates=[pb.Candidate(token_ids=[7])])
    submit = pb.Submit(request_id="a", token_ids=list(range(100)), scoring=scoring)
    async with serving(tiny_model) as service:
        other = told(service, watching())
        assert (await anext(other)).block_snapshot.engine.max_step_tokens == 64
        stream = told(service, watching(submit))
        heard = []
        while not heard or heard[-1].WhichOneof("event") != "finished":
            heard.append(await anext(stream))
        changes = [await anext(other) for _ in range(2)]
        late = told(service, watching())
        snapshot = (await anext(late)).block_snapshot
        for each in (stream, other, late):
            await each.aclose()

    kinds = [response.WhichOneof("event") for response in heard]
    assert kinds == [
        "block_snapshot", "block_changes", "progress", "block_changes", "scores", "finished",
    ]  # fmt: skip
    assert heard[2].progress.computed_tokens == 64
    assert [change.block_changes.sequence for change in changes] == [1, 2]
    stored = b"".join(change.block_changes.stored for change in changes)
    assert (snapshot.sequence, snapshot.hashes, len(stored)) == (2, stored, 6 * 16)


def structured(request_id: str, **grammar: str) -> pb.Submit:
    generation = pb.Generation(max_tokens=40, grammar=pb.Grammar(**grammar, field="guided"))
    return pb.Submit(request_id=request_id, token_ids=[5, 6], generation=generation)


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    return SimpleNamespace(directory=Path(__file__).parents[2] / "models" / "demo")


async def test_a_grammar_is_compiled_beside_other_requests_and_refused_if_it_is_none(
    demo: Any,
) -> None:
    asked = structured("good", choice='["yes", "no"]'), structured("bad", regex="(a")
    async with serving(demo) as service:
        stream = told(service, commands(*asked, structured("none")))
        last: dict[str, Any] = {}
        while len(last) < 3:
            response = await anext(stream)
            if response.WhichOneof("event") in ("finished", "failure"):
                last[response.request_id] = response
        await stream.aclose()

    assert last["good"].finished.reason == pb.FINISH_REASON_STOP
    for name in ("bad", "none"):
        assert (last[name].failure.field, last[name].failure.http_status) == ("guided", 400)


async def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_is_forgotten(
    demo: Any,
) -> None:
    submit = structured("gone", regex="[a-z]{5}")

    async def submit_and_cancel() -> AsyncIterator[pb.ExecuteRequest]:
        yield pb.ExecuteRequest(submit=submit)
        yield pb.ExecuteRequest(cancel=pb.Cancel(request_id="gone"))

    async with serving(demo) as service:
        stream = told(service, submit_and_cancel())
        responses = [response async for response in stream]  # ends when nothing is compiled

        assert responses == []
        assert len(service.requests) == 0


async def test_one_tenant_s_flood_of_grammars_has_none_of_another_refused(demo: Any) -> None:
    asked = [structured(f"flood {i}", regex=f"({i}") for i in range(40)]
    asked += [structured(f"modest {i}", regex=f"(m{i}") for i in range(12)]
    for submit in asked:
        submit.tenant = submit.request_id.split()[0]
    async with serving(demo) as service:
        stream = told(service, commands(*asked))
        ended = {}
        while len(ended) < len(asked):
            response = await anext(stream)
            if response.WhichOneof("event") == "failure":
                ended[response.request_id] = response.failure.http_status
        await stream.aclose()

    assert {ended[f"modest {i}"] for i in range(12)} == {400}  # the verdict on this grammar
    assert sorted(set(ended.values())) == [400, 503]


async def test_a_tokenizer_that_cannot_be_read_is_not_named_to_callers(tiny_model: Any) -> None:
    async with serving(tiny_model) as service:
        stream = told(service, commands(structured("a", regex="a")))
        response = await anext(stream)
        await stream.aclose()

    assert response.failure.field == "guided"
    assert str(tiny_model.directory) not in response.failure.message


class Ended:
    """A call that says why it was ended."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        raise grpc.aio.AbortError(details)


async def test_a_trace_holds_what_the_gates_of_every_layer_chose(tiny_model: Any) -> None:
    config = load_config(tiny_model.directory)
    async with serving(tiny_model) as service:
        stream: Any = service.RecordTrace(pb.RecordTraceRequest(), Any)
        shape = (await anext(stream)).shape
        prompt = list(range(1, 21))
        generation = pb.Generation(max_tokens=4, ignore_eos=True)
        submit = pb.Submit(request_id="a", token_ids=prompt, generation=generation)
        async for response in told(service, commands(submit)):
            if response.WhichOneof("event") == "finished":
                break
        layers = [(await anext(stream)).layers for _ in range(4)]

        assert (shape.num_experts, shape.top_k) == (config.moe.num_experts, config.moe.top_k)
        assert list(shape.layers) == list(config.moe_layers)
        assert [(step.rows, step.decode_rows) for step in layers] == [(20, 0)] + [(1, 1)] * 3
        for step in layers:
            ids = np.frombuffer(step.topk_ids, "<u2")
            assert ids.size == len(shape.layers) * step.rows * shape.top_k
            assert ids.max() < shape.num_experts
        other: Any = service.RecordTrace(pb.RecordTraceRequest(), Ended())
        with pytest.raises(grpc.aio.AbortError, match="recorded already"):
            await anext(other)
        await stream.aclose()  # and the next one may begin
        again: Any = service.RecordTrace(pb.RecordTraceRequest(), Any)
        assert (await anext(again)).WhichOneof("event") == "shape"
        await again.aclose()


async def next_of(stream: Any, kind: str) -> Any:
    async for response in stream:
        if response.WhichOneof("event") == kind:
            return getattr(response, kind)


async def test_gateways_are_told_of_each_other_s_work_and_of_its_end(tiny_model: Any) -> None:
    async with serving(tiny_model) as service:
        mine, theirs = told(service, watching()), told(service, watching(long_answer("a")))
        assert (await next_of(mine, "block_snapshot")).first
        await next_of(theirs, "tokens")
        service.load = EngineLoad(
            1, 0, 0, 0, 0, (), {2: Outstanding(1, 7, 900), 1: Outstanding(3, 9, 5)}
        )
        service.beat()
        service.beat()  # nothing new

        assert await next_of(mine, "others_work") == pb.OthersWork(
            num_requests=1, num_tokens=7, flops=900
        )
        assert (await next_of(theirs, "others_work")).num_requests == 3
        service.load = EngineLoad(0, 0, 0, 0, 0, (), {})
        service.beat()
        assert await next_of(mine, "others_work") == pb.OthersWork()
        await mine.aclose()
        await theirs.aclose()


async def test_the_engine_s_own_count_goes_by_stream(tiny_model: Any) -> None:
    async with serving(tiny_model) as service:
        one, two = told(service, commands(long_answer("a"))), told(service, commands())
        await anext(one)
        running = service.requests.engine
        assert running is not None
        engine, thread = running.engine, running.thread

        async def look() -> EngineLoad:
            return engine.load()

        assert {
            stream: w.num_requests for stream, w in (await thread.run(look())).outstanding.items()
        } == {1: 1}
        await one.aclose()
        await service.requests.idle.wait()

        async def has_nothing() -> bool:
            return not (await thread.run(look())).outstanding

        await until(has_nothing)  # the cancellation is on its way
        await two.aclose()


async def test_what_is_found_out_of_the_engine_later_is_told_with_a_new_snapshot(
    tiny_model: Any,
) -> None:
    async with serving(tiny_model) as service:
        stream = told(service, watching())
        before = await next_of(stream, "block_snapshot")
        service.streams.describe(pb.EngineProfile(max_step_tokens=64, slowdown=2.5))
        after = await next_of(stream, "block_snapshot")
        await stream.aclose()

    assert (before.engine.slowdown, after.engine.slowdown) == (0, 2.5)
    assert after.first


async def test_a_grammar_that_cannot_be_tried_fails_its_request_and_no_other(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(GrammarCompiler, "_found", no_process)
    structured = long_answer("structured")
    structured.generation.grammar.regex = "[0-9]{3}"
    async with serving(tiny_model) as service:
        stream = told(service, commands(long_answer("other"), structured))
        ended = {}
        async for response in stream:
            kind = response.WhichOneof("event")
            if kind in ("finished", "failure"):
                ended[response.request_id] = kind
            if len(ended) == 2:
                break

        await stream.aclose()
    assert ended == {"structured": "failure", "other": "finished"}
