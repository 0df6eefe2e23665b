"""The load generator of benchmarks: requests go when they are due, and count from then, whatever becomes of others."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from moesaic.cli.load.generator import COMPLETIONS, LoadClient, TimedRequest
from tests.waiting import until

HEAD = "HTTP/1.1 {status} X\r\nContent-Type: x\r\n{more}\r\n\r\n"
EVENT = {"choices": [{"text": "a", "token_ids": [7]}]}


class Gateway:
    """Answers as each request's body says; ``answer`` may be held until all have come."""

    def __init__(self) -> None:
        self.come: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.go = asyncio.Event()
        self.open = 0  # connections
        self.dialled: set[asyncio.StreamWriter] = set()  # those that were said to close

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with suppress(asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.come.append(body)
                self.headers.append(head.decode())
                await getattr(self, body["answer"])(writer)
        writer.close()
        await writer.wait_closed()
        self.open -= 1

    async def held(self, writer: asyncio.StreamWriter) -> None:
        await self.go.wait()
        await self.streamed(writer)

    async def streamed(self, writer: asyncio.StreamWriter) -> None:
        self.go.set()
        writer.write(HEAD.format(status=200, more="Transfer-Encoding: chunked").encode())
        for event in (json.dumps(EVENT), json.dumps(EVENT), "[DONE]"):
            data = f"data: {event}\n\n"
            writer.write(f"{len(data):x}\r\n{data}\r\n".encode())
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def whole(self, writer: asyncio.StreamWriter) -> None:
        self._write(writer, 200, EVENT | {"moesaic": {"quality": {"degraded_share": 0.5}}})

    async def last(self, writer: asyncio.StreamWriter) -> None:
        data = json.dumps(EVENT).encode()
        more = f"Connection: close\r\nContent-Length: {len(data)}"
        writer.write(HEAD.format(status=200, more=more).encode() + data)
        self.dialled.add(writer)

    async def unmeasured(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.format(status=200, more="X: y").encode() + json.dumps(EVENT).encode())
        writer.close()

    async def refused(self, writer: asyncio.StreamWriter) -> None:
        self._write(writer, 503, {"error": {"code": "overloaded"}})

    async def cut(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.format(status=200, more="Transfer-Encoding: chunked").encode())
        writer.close()

    async def raw(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self.come[-1]["bytes"].encode())
        writer.close()

    def _write(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = HEAD.format(status=status, more=f"Content-Length: {len(data)}").encode()
        writer.write(head + data)


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[Gateway, LoadClient]]:
    made = Gateway()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    client = LoadClient(server.sockets[0].getsockname()[1], COMPLETIONS)
    yield made, client
    client.close()
    server.close()
    await until(lambda: made.open == 0)


def asks(*answers: str) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"answer": answers[number % len(answers)], "number": number}


async def test_a_request_waits_for_no_other_and_counts_from_when_it_was_due() -> None:
    async with gateway() as (asked, client):
        # The first is answered once the second has come.
        first, second = await client.open_loop([0.0, 0.02], asks("held", "streamed"))

    assert [body["number"] for body in asked.come] == [0, 1]
    assert first.complete
    assert second.complete
    assert first.ttft_s == first.token_times[0] - 0.0 >= second.sent_s
    assert second.ttft_s == second.token_times[0] - 0.02
    assert second.sent_s >= 0.02


async def test_a_client_that_is_late_makes_no_request_look_quicker() -> None:
    async with gateway() as (_, client):
        [late] = await client.open_loop([1.0], asks("streamed"), start_s=5.0)

    assert late.sent_s >= 5
    assert late.ttft_s >= 4


async def test_every_end_of_a_request_is_told() -> None:
    ends = ("streamed", "whole", "refused", "cut")
    async with gateway() as (asked, client):
        found = await client.open_loop(
            [0.0] * 4, asks(*ends), lambda number: {"X-Number": str(number)}
        )

    told = {end: each for end, each in zip(ends, found, strict=True)}
    assert [each.status for each in found] == [200, 200, 503, 0]
    assert [each.complete for each in found] == [True, True, False, False]
    assert (told["streamed"].token_ids, told["whole"].token_ids) == ([7, 7], [7])
    assert told["whole"].degraded_share == 0.5
    assert told["refused"].was_shed
    assert told["cut"].latency_s == float("inf")
    assert {f"X-Number: {n}" for n in range(4)} <= set("".join(asked.headers).split("\r\n"))


CHUNKED = HEAD.format(status=200, more="Transfer-Encoding: chunked")
EVENTS = HEAD.format(status=200, more="X: y")
LONG = "x" * (1 << 17)


@pytest.mark.parametrize(
    "odd",
    [
        LONG,
        HEAD.format(status=200, more=f"X: {LONG}"),
        HEAD.format(status="two", more="X: y"),
        HEAD.format(status=200, more="Content-Length: all"),
        f"{CHUNKED}zz\r\n",
        f"{CHUNKED}-5\r\n",
        f"{CHUNKED}{LONG}\r\n",
        f"{EVENTS}data: {{\n\n",
        f"{EVENTS}data: 5\n\ndata: [DONE]\n\n",
        f'{EVENTS}data: {{"choices": 5}}\n\ndata: [DONE]\n\n',
        f'{EVENTS}data: {{"choices": ["a"]}}\n\ndata: [DONE]\n\n',
        f'{EVENTS}data: {{"usage": 5}}\n\ndata: [DONE]\n\n',
        f"{EVENTS}data: {'[' * 100_000}\n\ndata: [DONE]\n\n",
    ],
    ids=range(13),
)
async def test_an_odd_answer_fails_its_request_alone(odd: str) -> None:
    def body(number: int) -> dict[str, Any]:
        return {"answer": "streamed"} if number else {"answer": "raw", "bytes": odd}

    async with gateway() as (_, client):
        found = await client.open_loop([0.0, 0.0], body, most=1)

    assert [each.complete for each in found] == [False, True]
    assert found[0].error
    assert found[0].error != "the answer broke off"


async def test_events_without_choices_are_passed_over() -> None:
    events = ({"type": "ping"}, EVENT | {"error": None}, {"choices": None}, EVENT)
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    answer = {"answer": "raw", "bytes": f"{EVENTS}{stream}data: [DONE]\n\n"}

    async with gateway() as (_, client):
        [found] = await client.open_loop([0.0], lambda _: answer)

    assert (found.complete, found.text, found.error) == (True, "aa", "")


async def test_clients_of_a_closed_loop_ask_one_request_after_the_other() -> None:
    async with gateway() as (asked, client):
        found = await client.closed_loop(2, asks("whole"), count=7)

    assert len(found) == 7
    assert all(each.complete for each in found)
    assert [each.number for each in found] == list(range(len(asked.come)))
    ends = sorted(each.end_s for each in found)
    # Of two clients, the third request follows an answer.
    assert all(found[n].due_s >= ends[n - 2] for n in range(2, len(found)))


async def test_no_request_is_sent_on_a_connection_that_closes_behind_its_answer() -> None:
    async with gateway() as (asked, client):
        found = await client.closed_loop(1, asks("last"), count=3)

    assert [each.complete for each in found] == [True] * 3
    assert len(asked.dialled) == 3


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with gateway() as (_, client):
        found = await client.closed_loop(1, asks("unmeasured"), count=2)

    assert [(each.complete, each.token_ids) for each in found] == [(True, [7])] * 2


def test_an_answer_is_read_from_parts_that_are_cut_anywhere() -> None:
    events = [
        {"choices": [{"delta": {"content": "a"}, "token_ids": [7]}]},
        {"choices": [{"delta": {"content": "bc"}, "token_ids": [8, 9]}]},
        {
            "choices": [{"delta": {}, "finish_reason": "stop"}],
            "moesaic": {"quality": {"mean_threshold": 0.6, "degraded_share": 0.3}},
        },
    ]
    stream = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    stream = b": silence\n\n" + stream + b"data: [DONE]\n\n"
    cut = stream.index(b"[8, 9]") + 2
    request = TimedRequest(0, 1.0, 1.0, 200, [(2.0, stream[:cut]), (3.0, stream[cut:])])

    request.read()

    assert (request.token_ids, request.token_times) == ([7, 8, 9], [2, 3, 3])
    assert (request.complete, request.ttft_s, request.tpot_s) == (True, 1, 0.5)
    assert (request.mean_threshold, request.degraded_share) == (0.6, 0.3)


def test_an_answer_that_breaks_off_with_an_error_is_none() -> None:
    stream = b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'
    request = TimedRequest(0, 0.0, 0.0, 200, [(1.0, stream)])

    request.read()

    assert not request.complete
    assert not request.was_shed
