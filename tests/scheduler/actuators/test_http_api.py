"""Calls of a server that does not answer, or answers something else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moesaic.errors import DeadlineExceeded, NotReady
from moesaic.services.scheduler.scaling.actuators.http_api import HttpApi


@asynccontextmanager
async def server_that_says(answer: bytes | None) -> AsyncIterator[HttpApi]:
    """Give the API of a server with one answer to all requests; None: it never answers."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        yield HttpApi("the engine", f"tcp://{host}:{port}", setting="socket")


async def test_a_server_that_has_the_request_and_does_not_answer_is_out_of_time() -> None:
    async with server_that_says(None) as api:
        with pytest.raises(DeadlineExceeded, match="the engine at tcp://"):
            await api.call("POST", "/stop", timeout_s=0.05)


async def test_a_server_that_does_not_speak_http_cannot_be_reached() -> None:
    async with server_that_says(b"220 mail\r\n\r\n") as api:
        with pytest.raises(NotReady, match=r"the engine at tcp://.* cannot be reached"):
            await api.call("GET", "/")


async def test_words_that_are_no_json_are_the_message() -> None:
    head = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 9\r\n\r\n"
    async with server_that_says(head + b"no luck\r\n") as api:
        answer = await api.call("GET", "/")

    assert (answer.status, answer.message) == (502, "no luck")


async def test_the_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with server_that_says(b"HTTP/1.1 204 No Content\r\n\r\n") as api:
        assert (await api.call("GET", "/")).status == 204
