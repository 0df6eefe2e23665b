"""What comes before a body: heads that are too long, too slow, or none, on a bare socket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moesaic.services.gateway.http import protocol as http_protocol
from moesaic.services.gateway.http.protocol import MAX_HEAD_BYTES
from moesaic.services.gateway.main import http_server
from moesaic.services.gateway.settings import GatewaySettings


class Client:
    """A connection that sends any bytes; ``hang_up`` closes it behind the test."""

    writers: ClassVar[list[asyncio.StreamWriter]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.writers.append(writer)

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
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(line[16:]) for line in lines if line.startswith("content-length: "))
        return int(lines[0].split()[1]), json.loads(await self._reader.readexactly(length))

    async def ended(self) -> bool:
        return not await self._reader.read()


@pytest.fixture(autouse=True)
async def hang_up() -> AsyncIterator[None]:
    yield
    while Client.writers:
        writer = Client.writers.pop()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def stage(open_house: Any) -> AsyncIterator[Any]:
    async with open_house() as house:
        yield house


HEAD = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def test_a_client_may_connect_as_soon_as_the_address_is_known(model_directory: Path) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        """Answers nobody."""

    async with http_server(GatewaySettings(model=str(model_directory), port=0), app) as address:
        host, port = address.split(":")
        socket.create_connection((host, int(port))).close()  # before the loop does anything more


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


async def test_blank_lines_without_end_are_told_the_bound(stage: Any) -> None:
    client = await Client.to(stage.url)
    await client.send(b"\r\n" * MAX_HEAD_BYTES)

    status, _ = await client.answer()
    assert status == 431
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


async def test_an_incomplete_head_after_a_request_costs_no_answer(
    open_house: Any, scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
    usual = http_protocol.BoundedHttp._give_up

    def give_up(connection: Any) -> None:
        usual(connection)
        given_up.set()

    async def script(submit: Any, emit: Any) -> None:
        begun.set()
        await goes_on.wait()
        await scripts.says("yes")(submit, emit)

    monkeypatch.setattr(http_protocol.BoundedHttp, "_give_up", give_up)
    async with open_house(script) as house:
        client, body = await Client.to(house.url), b'{"prompt": "a", "max_tokens": 4}'
        await client.send(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await begun.wait()
        monkeypatch.setattr(http_protocol, "HEAD_S", 0.05)
        await client.send(b"GET /")
        await given_up.wait()
        goes_on.set()

        assert (await client.answer())[0] == 200
        assert (await client.answer())[0] == 408
        assert await client.ended()


async def test_a_connection_serves_one_request_after_another(stage: Any) -> None:
    client = await Client.to(stage.url)

    for _ in range(3):
        await client.send(HEAD + b"\r\n")
        assert (await client.answer())[0] == 200


async def test_bodies_of_two_lengths_are_refused(stage: Any) -> None:
    client = await Client.to(stage.url)
    await client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )

    assert (await client.answer())[0] == 400
    assert await client.ended()


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
UNDER_WAY = b"content-type: application/json\r\ncontent-length: 1000000000\r\n\r\n"


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nx-trailer: ", b"0\r\n" + b"a: b\r\n" * 1000, b"1;ext=", b"0;ext="],
    ids=["one trailer", "trailers", "an extension", "the last extension"],
)
@pytest.mark.parametrize("key", ["", "wanted"])
async def test_what_frames_a_body_is_bounded_with_and_without_a_key(
    open_house: Any, endless: bytes, key: str
) -> None:
    async with open_house(api_key=key) as house:
        client = await Client.to(house.url)
        await client.send(CHUNKED + endless)
        trickle = b"a: b\r\n" * 3000 if endless.endswith(b"b\r\n") else b"a" * 18_000

        with pytest.raises(ConnectionError):
            await client.send_many(trickle, 1000)  # far more than is read


@pytest.mark.parametrize("key", ["", "wanted"])
async def test_a_body_in_endless_smallest_chunks_is_hung_up_on_soon(
    open_house: Any, key: str
) -> None:
    async with open_house(api_key=key) as house:
        client = await Client.to(house.url)
        await client.send(CHUNKED)

        with pytest.raises(ConnectionError):
            await client.send_many(b"1\r\na\r\n" * 3000, 200)  # less than what may be drained


async def test_a_body_in_the_smallest_chunks_is_a_body(open_house: Any, scripts: Any) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 1, "stop": ["x" * 1000] * 4}).encode()
    async with open_house(scripts.says("yes")) as house:
        client = await Client.to(house.url)
        await client.send(
            CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-type: application/json\r\n\r\n")
        )

        await client.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body))
        await client.send(b"0\r\nauthorization: Bearer nobody\r\n\r\n")

        assert (await client.answer())[0] == 200


async def test_after_a_refusal_the_rest_of_a_body_is_read_for_a_while_only(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "DRAIN_BYTES", 1 << 20)
    async with open_house(api_key="wanted", max_body_bytes=1 << 30) as house:
        client = await Client.to(house.url)
        await client.send(HEAD.replace(b"GET", b"POST") + UNDER_WAY)

        status, _ = await client.answer()
        await client.send(b"a" * (1 << 19))
        with pytest.raises(ConnectionError):
            await client.send_many(b"a" * (1 << 18), 1000)

    assert status == 401


async def test_after_a_refusal_a_body_that_does_not_come_is_not_waited_for(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "DRAIN_S", 0.2)
    async with open_house(api_key="wanted", max_body_bytes=1 << 30) as house:
        client = await Client.to(house.url)
        await client.send(HEAD.replace(b"GET", b"POST") + UNDER_WAY)

        assert (await client.answer())[0] == 401
        assert await client.ended()


async def test_a_refused_body_that_does_come_leaves_the_connection_as_it_was(
    open_house: Any,
) -> None:
    async with open_house(api_key="wanted") as house:
        client = await Client.to(house.url)
        for _ in range(3):
            await client.send(HEAD.replace(b"GET", b"POST") + b"content-length: 100000\r\n\r\n")
            assert (await client.answer())[0] == 401
            await client.send(b"a" * 100_000)


async def test_few_requests_may_wait_on_one_connection(stage: Any) -> None:
    waiting, flood = await Client.to(stage.url), await Client.to(stage.url)

    await waiting.send((HEAD + b"\r\n") * 20)
    with pytest.raises(ConnectionError):
        await flood.send_many((HEAD + b"\r\n") * 5000, 100)

    for _ in range(20):
        assert (await waiting.answer())[0] == 200


async def test_many_connections_leave_room_for_those_who_ask(
    open_house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 3)
    async with open_house() as house:
        silent, slow, kept = [await Client.to(house.url) for _ in range(3)]
        await slow.send(POST + b"content-length: 100000\r\n\r\n{")
        await kept.send(HEAD + b"\r\n")
        assert (await kept.answer())[0] == 200

        for ended in (silent, slow):
            client = await Client.to(house.url)
            await client.send(HEAD + b"\r\n")
            assert (await client.answer())[0] == 200
            with suppress(ConnectionError):
                assert await ended.ended()
        # ``kept`` has asked since, and counts as silent from then on only.
        await kept.send(HEAD + b"\r\n")
        assert (await kept.answer())[0] == 200


async def test_a_request_that_is_worked_on_is_never_hung_up_on(
    open_house: Any, scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 1)
    goes_on, begun = asyncio.Event(), asyncio.Event()

    async def script(submit: Any, emit: Any) -> None:
        begun.set()
        await goes_on.wait()
        await scripts.says("yes")(submit, emit)

    async with open_house(script) as house:
        body = b'{"prompt": "a", "max_tokens": 4}'
        asking = await Client.to(house.url)
        await asking.send(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await begun.wait()
        for _ in range(3):
            with suppress(ConnectionError):
                assert await (await Client.to(house.url)).ended()
        goes_on.set()
        assert (await asking.answer())[0] == 200
