"""What comes before a body: heads that are too long, too slow, or none, on a bare socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway import http_protocol
from services.gateway.http_protocol import MAX_HEAD_BYTES


class Client:
    """A connection that sends whatever bytes it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> "Client":
        host, port = url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_many(self, data: bytes, times: int) -> None:
        for _ in range(times):
            await self.send(data)
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, Any]:
        async with asyncio.timeout(20):
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            length = next(int(line[16:]) for line in lines if line.startswith("content-length: "))
            return int(lines[0].split()[1]), json.loads(await self._reader.readexactly(length))

    async def ended(self) -> bool:
        async with asyncio.timeout(20):
            return not await self._reader.read()


@pytest.fixture
async def stage(open_house: Any) -> AsyncIterator[Any]:
    async with open_house() as house:
        yield house


HEAD = b"GET /v1/models HTTP/1.1\r\nhost: here\r\n"


async def test_a_head_may_come_byte_by_byte(stage: Any) -> None:
    client = await Client.to(stage.url)

    for byte in HEAD + b"\r\n":
        await client.send(bytes([byte]))

    status, body = await client.answer()
    assert (status, body["object"]) == (200, "list")


async def test_a_header_that_never_ends_is_refused_and_hung_up_on(stage: Any) -> None:
    client = await Client.to(stage.url)
    await client.send(HEAD + b"x-long: ")

    with pytest.raises(ConnectionError):
        await client.send_many(b"a" * 1000, 100_000)  # far more than is read


async def test_too_long_a_head_is_told_the_bound(stage: Any) -> None:
    client = await Client.to(stage.url)
    await client.send(HEAD + b"x-long: " + b"a" * (MAX_HEAD_BYTES - 10))

    await client.send(b"a")

    status, body = await client.answer()
    assert (status, body["error"]["code"]) == (431, "request_too_large")
    assert str(MAX_HEAD_BYTES) in body["error"]["message"]
    assert await client.ended()


async def test_what_is_no_http_gets_an_error_of_the_usual_shape(stage: Any) -> None:
    client = await Client.to(stage.url)
    await client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")

    status, body = await client.answer()
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert await client.ended()


async def test_a_head_that_does_not_come_is_not_waited_for(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    silent, slow = await Client.to(stage.url), await Client.to(stage.url)
    await slow.send(HEAD)

    for client in (silent, slow):
        status, body = await client.answer()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert await client.ended()


async def test_a_connection_serves_one_request_after_another(stage: Any) -> None:
    client = await Client.to(stage.url)

    for _ in range(3):
        await client.send(HEAD + b"\r\n")
        assert (await client.answer())[0] == 200


async def test_bodies_of_two_lengths_are_refused(stage: Any) -> None:
    client = await Client.to(stage.url)
    await client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )

    assert (await client.answer())[0] == 400
    assert await client.ended()
