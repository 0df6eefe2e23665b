"""All attention workers fall silent for a while, as on a host that stands still: what runs goes on afterwards.

No cheaper test has gRPC say of a peer that it does not answer, for which it takes a second.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from moesaic.cluster.rpc import channels
from moesaic.services.gateway.workers.execution import MAX_ATTEMPTS
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.workers.test_workers_lost import BODY, TEXT, text_of

KEEPALIVE = {
    "grpc.keepalive_time_ms": 200,
    "grpc.keepalive_timeout_ms": 100,
    "grpc.http2.ping_timeout_ms": 100,
}
STREAMS = 6


@pytest.fixture(autouse=True)
def soon_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice a silent peer soon: what follows is the same, and tests wait less."""
    quick = [(name, KEEPALIVE.get(name, value)) for name, value in channels.CHANNEL_OPTIONS]
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", quick)


class Way:
    """The way to a worker, on which nothing moves during a pause, as if the worker's process was stopped."""

    def __init__(self, port: int) -> None:
        self._port, self._moves = port, asyncio.Event()
        self._moves.set()
        self._open: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            server.close()
            while self._open:
                for task in self._open:
                    task.cancel()
                await asyncio.wait(self._open)

    def pause(self) -> None:
        self._moves.clear()

    def resume(self) -> None:
        self._moves.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry_both(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            ends.append(back)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, back))
                both.create_task(self._carry(there, writer))
        except* OSError:
            pass  # the worker or the gateway has gone
        finally:
            for end in ends:
                end.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._moves.wait()
            sink.write(data)
        raise ConnectionResetError


@asynccontextmanager
async def ways_to_all(house: Any) -> AsyncIterator[list[Way]]:
    """Put a way before each worker; the gateway dials it from now on."""
    async with AsyncExitStack() as stack:
        ways = []
        for number, worker in enumerate(house.workers, 1):
            way = Way(int(worker.address.rpartition(":")[2]))
            address = await stack.enter_async_context(way.open())
            record = house.fleet.workers[f"attention-{number}"]
            house.fleet.put(replace(record, generation=2, admin_address=address))
            ways.append(way)
        workers = house.gateway.workers
        await house.until(lambda: {w.key[1] for w in workers.accepting} == {2})
        await house.until(lambda: len(workers.accepting) == len(ways))
        yield ways


class Begun:
    """A script that says a few tokens and then nothing, until it is told to go on to the end.

    Attributes:
        runs: that have begun. A busy machine may lose a worker before that, so attempts tell nothing.
        goes_on: set once the next attempts shall end.
    """

    def __init__(self, scripts: Any, said: int) -> None:
        self._scripts, self._said = scripts, said
        self.runs: set[str] = set()
        self.goes_on = asyncio.Event()

    async def __call__(self, submit: pb.Submit, emit: Any) -> None:
        if self.goes_on.is_set():
            await self._scripts.says(TEXT)(submit, emit)
            return
        first = submit.generation.num_resumed_tokens
        for index, token_id in enumerate(self._scripts.ids(TEXT)[first : self._said]):
            emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id]))
        self.runs.add(submit.request_id)


async def stall(house: Any, ways: list[Way]) -> None:
    """Pause all workers until the gateway has given up each, then let them go on."""
    workers = house.gateway.workers
    for way in ways:
        way.pause()
    await house.until(lambda: not workers.accepting)
    for way in ways:
        way.resume()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("said", [0, 4])
async def test_streams_go_on_after_all_workers_were_paused(
    open_house, scripts, count: int, said: int
) -> None:
    script = Begun(scripts, said)
    async with open_house(*[script] * count) as house, ways_to_all(house) as ways:
        asking = [
            asyncio.ensure_future(
                house.client.post("/v1/completions", json={**BODY, "stream": number % 2 == 0})
            )
            for number in range(STREAMS)
        ]
        await house.until(lambda: len(script.runs) == STREAMS)
        script.goes_on.set()  # what has begun does not look again
        await stall(house, ways)
        responses = await asyncio.gather(*asking)

    texts = [
        text_of(r.text) if r.text.startswith("data:") else r.json()["choices"][0]["text"]
        for r in responses
    ]
    assert texts == [TEXT] * STREAMS


async def test_a_single_run_survives_more_pauses_than_it_may_lose_workers(
    open_house, scripts
) -> None:
    """It is moved from one paused worker to the next, and no token comes in between."""
    submits: list[int] = []

    async def script(submit: pb.Submit, emit: Any) -> None:
        submits.append(submit.attempt)
        if len(submits) > MAX_ATTEMPTS:
            await scripts.says(TEXT)(submit, emit)

    async with open_house(script, script) as house, ways_to_all(house) as ways:
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=BODY))
        while len(submits) <= MAX_ATTEMPTS and not asking.done():
            seen = len(submits)
            await house.until(lambda seen=seen: len(submits) > seen or asking.done())
            await stall(house, ways)
        response = await asking

    assert response.json()["choices"][0]["text"] == TEXT


async def test_a_worker_that_ends_beside_a_paused_one_is_waited_for(open_house, scripts) -> None:
    script = Begun(scripts, 0)
    async with open_house(*[script] * 2) as house, ways_to_all(house) as ways:
        asking = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY)) for _ in range(2)
        ]
        await house.until(lambda: len(script.runs) == 2)
        script.goes_on.set()
        ways[0].pause()
        await house.workers[1].kill()
        await house.until(lambda: not house.gateway.workers.accepting)
        ways[0].resume()
        texts = [r.json()["choices"][0]["text"] for r in await asyncio.gather(*asking)]

    assert texts == [TEXT] * 2


async def test_many_runs_share_the_blame_for_a_worker_that_ends(open_house, scripts) -> None:
    """Two workers end one after the other before any of many runs has a token, and all runs go on."""
    told: set[str] = set()

    def waits(is_last: Callable[[], bool]) -> Any:
        async def script(submit: pb.Submit, emit: Any) -> None:
            told.add(submit.request_id)
            if is_last():
                await scripts.says(TEXT)(submit, emit)

        return script

    async with open_house(waits(lambda: False)) as house:
        asking = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY))
            for _ in range(STREAMS)
        ]
        for following in (False, True):
            await house.until(lambda: len(told) == STREAMS)
            told.clear()
            await house.add(waits(lambda following=following: following))
            await house.workers[-2].kill()
            house.fleet.drop(f"attention-{len(house.workers) - 1}")
        texts = [r.json()["choices"][0]["text"] for r in await asyncio.gather(*asking)]

    assert texts == [TEXT] * STREAMS
