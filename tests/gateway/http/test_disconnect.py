"""A client that leaves, and a stream's first bytes, to the moment."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from moesaic.errors import DeadlineExceeded, NotReady
from moesaic.services.gateway.access import Places
from moesaic.services.gateway.generate import deliver
from moesaic.services.gateway.generate.deliver import EventStream
from moesaic.services.gateway.http import request_record
from moesaic.services.gateway.http.request_record import (
    ClientClosed,
    RequestRecord,
    while_connected,
)
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.services.gateway.workers.execution import Execution
from moesaic.services.gateway.workers.run import Deadline, Run, SlowClient
from moesaic.services.gateway.workers.workers import Workers
from moesaic.v1.attention_pb2 import Generation

# Timers of one loop fire in their order, however busy the machine is.
SOON_S = 0.01


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_record, "LOOK_AFTER_S", SOON_S)
    monkeypatch.setattr(deliver, "SEND_S", 10 * SOON_S)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_leaving_ends_the_work() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientClosed):
        await while_connected(receive, asyncio.sleep(60))
    await asyncio.sleep(SOON_S)  # nothing is cancelled any more


async def test_a_receive_that_fails_is_the_cause_of_the_leaving() -> None:
    async def receive() -> Message:
        raise RuntimeError("broken")

    with pytest.raises(ClientClosed) as caught:
        await while_connected(receive, asyncio.sleep(60))

    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("work_first", [True, False])
async def test_leaving_in_the_moment_of_the_result_cancels_nothing_else(work_first) -> None:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[int] = loop.create_future()
    message: asyncio.Future[Message] = loop.create_future()

    async def receive() -> Message:
        return await message

    async def work() -> int:
        return await result

    def both() -> None:
        result.set_result(5) if work_first else message.set_result({"type": "http.disconnect"})
        message.set_result({"type": "http.disconnect"}) if work_first else result.set_result(5)

    loop.call_later(3 * SOON_S, both)
    try:
        assert await while_connected(receive, work()) == 5
    except ClientClosed:
        assert not work_first
    await asyncio.sleep(SOON_S)  # would be cancelled


async def test_what_ended_a_request_first_is_its_error(model_directory, language) -> None:
    class NoWorkers(Workers):
        def submit(self, *_: object) -> None: ...

        def cancel(self, *_: object) -> None: ...

    run = Run([1, 2], Generation(max_tokens=1))
    workers = NoWorkers(language.config, GatewaySettings(model=str(model_directory)))
    for error in (SlowClient(), NotReady("the gateway is stopping", code="draining"), None):
        deadline = Deadline.after(2000 * SOON_S / 1000)
        async with Execution(workers, "r", [run], deadline, Places()) as execution:
            if error is not None:
                execution.abort(error)
            await asyncio.sleep(5 * SOON_S)
            with pytest.raises(type(error) if error else DeadlineExceeded):
                await execution.next_events()
        run.done = False


class Wire:
    """What a stream sends. The first message waits until it is let through, as on a connection that is not read."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.open = asyncio.Event()
        self.waiting = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.waiting.set()
        await self.open.wait()
        self.sent.append(message)

    @property
    def types(self) -> list[str]:
        return [message["type"].rpartition(".")[2] for message in self.sent]


async def test_a_comment_that_could_not_be_sent_does_not_cost_the_head() -> None:
    wire = Wire()

    async def chunks() -> AsyncGenerator[bytes, None]:
        await wire.waiting.wait()
        await asyncio.sleep(20 * SOON_S)  # the comment has given up
        wire.open.set()
        yield b"data: 1\n\n"
        yield b""

    answer = EventStream(RequestRecord("r", "POST"), chunks(), keep_alive_s=SOON_S)
    await answer({"type": "http"}, never, wire.send)

    assert wire.types[0] == "start"
    assert wire.types.count("start") == 1
    assert wire.sent[-1]["more_body"] is False
    assert b"data: 1" in b"".join(message.get("body", b"") for message in wire.sent)


async def test_an_error_before_the_first_bytes_is_the_whole_answer() -> None:
    wire = Wire()

    async def chunks() -> AsyncGenerator[bytes, None]:
        await wire.waiting.wait()  # a comment is on its way
        asyncio.get_running_loop().call_later(SOON_S, wire.open.set)
        raise NotReady("no worker")
        yield b""

    answer = EventStream(RequestRecord("r", "POST"), chunks(), keep_alive_s=SOON_S)
    await answer({"type": "http"}, never, wire.send)

    assert wire.types == ["start", "body"]
    assert wire.sent[0]["status"] == 503
