"""Streams of commands and events, on a real engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.batching import Limits
from moesaic.engine.engine import Engine
from moesaic.engine.requests import Event
from moesaic.engine.thread import engine_thread
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import load_config
from moesaic.models.decoder import Decoder
from moesaic.v1 import attention_pb2 as pb
from services.attention import admin
from services.attention.admin import AttentionAdmin

LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_reqs=64, max_model_len=512
)


@asynccontextmanager
async def serving(model: Any) -> AsyncIterator[AttentionAdmin]:
    """A service with its engine on a thread of its own, as a worker has them."""
    config, checkpoint = load_config(model.directory), Checkpoint(model.directory)
    how = (checkpoint, config, torch.float32, torch.device("cpu"))
    service, main_loop = AttentionAdmin(config), asyncio.get_running_loop()

    def emit(events: list[Event]) -> None:
        main_loop.call_soon_threadsafe(service.deliver, events)

    async def opened() -> Engine:
        return Engine(Decoder.load(*how), LocalDispatcher(*how), LIMITS, 64, emit, 5.0)

    async with engine_thread() as thread:
        engine = await thread.run(opened())
        service.attach(thread, engine)
        running = asyncio.create_task(thread.run(engine.run()))
        yield service
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        service.detach()


async def commands(*submits: pb.Submit) -> AsyncIterator[pb.ExecuteRequest]:
    for submit in submits:
        yield pb.ExecuteRequest(submit=submit)
    await asyncio.Event().wait()


def long_answer(request_id: str) -> pb.Submit:
    generation = pb.Generation(max_tokens=400, ignore_eos=True)
    return pb.Submit(request_id=request_id, token_ids=[5, 6], generation=generation)


async def test_a_stream_that_nobody_reads_is_ended_and_its_requests_with_it(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_QUEUED_EVENTS", 20)
    async with serving(tiny_model) as service:
        stream: Any = service.Execute(commands(long_answer("a"), long_answer("b")), Any)
        await anext(stream)
        assert service.num_open == 2
        await service.idle.wait()

        rest = [response async for response in stream]
        assert all(response.WhichOneof("event") == "tokens" for response in rest)
        assert len(rest) <= 20


async def test_a_stream_that_waits_for_an_answer_gets_signs_of_life(tiny_model: Any) -> None:
    async with serving(tiny_model) as service:
        service.beat()  # nobody waits
        stream: Any = service.Execute(commands(long_answer("a")), Any)
        first = await anext(stream)
        while service._streams[1].qsize():  # white box: until all news was read
            await anext(stream)
        service.beat()
        service.beat()
        kinds = [(await anext(stream)).WhichOneof("event") for _ in range(2)]
        await stream.aclose()

    assert first.WhichOneof("event") == "tokens"
    assert kinds == [None, "tokens"]


async def test_without_an_engine_requests_are_refused_for_others_to_take(tiny_model: Any) -> None:
    async with serving(tiny_model) as service:
        pass

    stream: Any = service.Execute(commands(long_answer("late")), Any)
    response = await anext(stream)
    await stream.aclose()

    assert (response.failure.code, response.failure.retryable) == ("not_ready", True)
