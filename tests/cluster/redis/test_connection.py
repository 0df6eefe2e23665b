"""Connections to Redis: what fails, and how it is told."""

import asyncio
from contextlib import suppress
from itertools import count

import msgspec
import pytest

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.connection import check_redis, outages
from moesaic.errors import InvalidInput, NotReady, PeerLost
from moesaic.messages.placement import PlacementHint


async def test_a_redis_that_hangs_fails_the_command_and_nothing_is_repeated(bus, redis_server):
    await bus.append("s", PlacementHint(epoch=1))
    redis_server.pause()
    with pytest.raises(PeerLost, match="no answer in time"):
        await bus.append("s", PlacementHint(epoch=2))
    redis_server.resume()

    await bus.append("s", PlacementHint(epoch=3))
    entries = await bus.connection.client.xrange("moesaic:{test}:s")
    sealed = [bus.connection.seals.open("s", fields[b"p"]).message for _, fields in entries]
    epochs = [msgspec.msgpack.decode(message)["epoch"] for message in sealed]
    assert epochs in ([1, 2, 3], [1, 3])


async def test_a_redis_without_memory_refuses_writes_and_is_usable_again(bus):
    await bus.connection.client.config_set("maxmemory", 1)
    with pytest.raises(PeerLost, match="maxmemory"):
        await bus.put("a", PlacementHint(epoch=1))
    await bus.connection.client.config_set("maxmemory", 0)

    await bus.put("a", PlacementHint(epoch=1))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "http://canary@host",
            r"--redis-url .*must begin with one of redis://.*http://\*\*\*@host",
        ),
        ("redis://host:port", r"--redis-url .*Port could not be cast"),
        ("", r"--redis-url .*must begin"),
    ],
)
async def test_a_url_that_cannot_be_one_fails_at_once(url, text):
    with pytest.raises(InvalidInput, match=text) as refused:
        async with Bus.connect(url, "test"):
            pass
    assert "canary" not in str(refused.value)


async def test_something_else_that_answers_is_not_redis():
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(InvalidInput, match="what answers there is not Redis"):
            await check_redis(f"redis://127.0.0.1:{port}")


async def test_wrong_credentials_are_said_and_not_shown(bus, redis_server):
    await bus.connection.client.config_set("requirepass", "right")
    try:
        with pytest.raises(InvalidInput, match="refuses these credentials") as refused:
            await check_redis(redis_server.url.replace("unix://", "unix://:canary@"))
        assert "canary" not in str(refused.value)
        await check_redis(redis_server.url.replace("unix://", "unix://:right@"))
    finally:
        await bus.connection.client.config_set("requirepass", "")


async def test_a_redis_that_is_not_there_yet_is_waited_for(redis_server):
    redis_server.kill()
    with pytest.raises(NotReady, match="--redis-url"):
        await check_redis(redis_server.url)
    waiting_for: list[str] = []

    async def connect() -> None:
        async with Bus.connect(redis_server.url, "test", waiting_for) as bus:
            await bus.put("a", PlacementHint(epoch=1))

    connecting = asyncio.create_task(connect())
    while not waiting_for:
        await asyncio.sleep(0.01)
    assert waiting_for == [f"redis at {redis_server.url}"]
    redis_server.start()
    await connecting
    assert waiting_for == []


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("failing", [False, True])
async def test_a_task_that_is_cancelled_in_a_command_ends(rounds: int, failing: bool) -> None:
    sending, sent = asyncio.Event(), asyncio.Event()

    async def send() -> None:
        sending.set()
        await sent.wait()
        if failing:
            raise OSError

    async def work() -> None:
        with suppress(PeerLost), outages("redis://localhost"):
            await asyncio.wait_for(send(), 600)  # as redis-py sends
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await sending.wait()
    sent.set()
    for _ in range(rounds):  # of the loop: in one of them the command ends as the request comes
        await asyncio.sleep(0)
    task.cancel()

    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_reader_that_puts_letters_aside_ends_at_whatever_turn_it_is_cancelled(bus):
    async def read(stream: str) -> None:
        async for message in bus.read_on(stream, msgspec.msgpack.Decoder(PlacementHint)):
            if message is not None:
                return  # it went on

    for turns in range(20, 50):
        stream = f"s{turns}"
        async with bus.connection.client.pipeline() as together:
            for _ in range(40):
                together.xadd(bus.connection.key(stream), {"p": b"no message"})
            await together.execute()
        task = asyncio.create_task(read(stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await bus.append(stream, PlacementHint(epoch=1))

        await asyncio.wait([task])
        assert task.cancelled(), f"after {turns} turns of the loop"


async def test_a_check_ends_at_whatever_turn_it_is_cancelled(redis_server):
    for turns in count():
        task = asyncio.create_task(check_redis(redis_server.url))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()

        await asyncio.wait([task])
        assert task.cancelled(), f"after {turns} turns of the loop"
    assert turns > 5
