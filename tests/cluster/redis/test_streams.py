"""Streams in Redis: watched and read on, through outages."""

import asyncio
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import pytest
from redis.exceptions import RedisError

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.placement import PlacementHint
from moesaic.telemetry.metrics import snapshot

hints: "msgspec.msgpack.Decoder[PlacementHint]" = msgspec.msgpack.Decoder(PlacementHint)


async def next_hint(watch: Any) -> PlacementHint:
    async for hint in watch:
        if hint is not None:
            return hint
    raise AssertionError("a watch never ends")


async def next_of(consumed: Any) -> PlacementHint:
    async for hint in consumed:
        if hint is not None:
            return hint
    raise AssertionError("a consumer never ends")


async def bus_lost(bus: Bus) -> bool:
    try:
        await bus.get_bytes("any")
    except PeerLost:
        return True
    return False


async def test_an_entry_that_nobody_of_the_cluster_appended_goes_to_the_dead_letters(bus):
    key, plain = "moesaic:{test}:s", msgspec.msgpack.encode(PlacementHint(epoch=6))
    async with aclosing(bus.watch("s", hints)) as watch, aclosing(bus.read_on("s", hints)) as all_:
        await anext(watch)
        await bus.connection.client.xadd(key, {"t": "placement-hint.v1", "p": plain})
        elsewhere = bus.sealed("another stream", PlacementHint(epoch=6))
        await bus.connection.client.xadd(key, {"t": "placement-hint.v1", "p": elsewhere})
        await bus.append("s", PlacementHint(epoch=1))

        assert await next_hint(watch) == await next_of(all_) == PlacementHint(epoch=1)
    assert await bus.latest("s", hints, 3) == [PlacementHint(epoch=1)]
    assert await bus.connection.client.xlen("moesaic:{test}:dlq:s") == 2


async def test_who_reads_on_is_given_once_what_somebody_appends_again(bus, redis_server):
    key = "moesaic:{test}:s"
    for epoch in (1, 2):
        await bus.append("s", PlacementHint(epoch=epoch))
    for _, fields in await bus.connection.client.xrange(key):  # all of it, once more
        await bus.connection.client.xadd(key, fields)
    async with Bus.connect(redis_server.url, "test") as another:
        await another.append("s", PlacementHint(epoch=3))

    async with aclosing(bus.read_on("s", hints)) as read:
        assert [(await next_of(read)).epoch for _ in range(3)] == [1, 2, 3]


async def test_a_watch_begins_with_a_look_and_then_has_every_entry(bus):
    await bus.append("s", PlacementHint(epoch=1))
    async with aclosing(bus.watch("s", hints)) as watch:
        assert await anext(watch) is None
        for epoch in (2, 3):
            await bus.append("s", PlacementHint(epoch=epoch))

        assert [await next_hint(watch), await next_hint(watch)] == [
            PlacementHint(epoch=2),
            PlacementHint(epoch=3),
        ]


async def test_a_poison_entry_goes_to_the_dead_letters_once_and_readers_go_on(bus):
    before = snapshot().get('moesaic_stream_dead_letters_total{stream="s"}', 0)
    async with aclosing(bus.watch("s", hints)) as one, aclosing(bus.watch("s", hints)) as two:
        await anext(one)
        await anext(two)
        key = "moesaic:{test}:s"
        sealed = bus.connection.seals.seal("s", b"\xc1" * 9000)
        poison = await bus.connection.client.xadd(key, {"t": "placement-hint.v1", "p": sealed})
        await bus.connection.client.xadd(key, {"other": "fields"})
        await bus.append("s", PlacementHint(epoch=2))

        assert await next_hint(one) == await next_hint(two) == PlacementHint(epoch=2)
    dead = await bus.connection.client.xrange("moesaic:{test}:dlq:s")
    assert dead[0][0] == poison
    assert len(dead) == 2
    assert len(dead[0][1][b"p"]) == 4096
    assert snapshot()['moesaic_stream_dead_letters_total{stream="s"}'] == before + 4


async def test_an_entry_of_a_newer_version_is_a_reason_to_look_not_a_dead_letter(bus):
    async with aclosing(bus.watch("new", hints)) as watch:
        await anext(watch)
        later = msgspec.msgpack.encode({"type": "placement-hint.v2", "epoch": "II"})
        payload = bus.connection.seals.seal("new", later)
        await bus.connection.client.xadd(
            "moesaic:{test}:new", {"t": "placement-hint.v2", "p": payload}
        )

        assert await anext(watch) is None
    assert await bus.connection.client.xlen("moesaic:{test}:dlq:new") == 0


async def test_old_entries_are_trimmed_by_their_age(bus):
    key = "moesaic:{test}:s"
    for i in range(300):
        await bus.connection.client.xadd(key, {"p": b""}, id=f"{1000 + i}-0")

    await bus.append("s", PlacementHint(epoch=1))
    await bus.append("s", PlacementHint(epoch=2))

    assert await bus.connection.client.xlen(key) < 300


@pytest.mark.parametrize("lose_data", [False, True])
async def test_a_watch_survives_a_killed_redis(bus, redis_server, lose_data):
    async with aclosing(bus.watch("s", hints)) as watch:
        await anext(watch)
        await bus.append("s", PlacementHint(epoch=1))
        assert await next_hint(watch) == PlacementHint(epoch=1)

        redis_server.kill(lose_data=lose_data)
        with pytest.raises(PeerLost, match="redis at unix://"):
            await bus.put("a", PlacementHint(epoch=2))
        assert snapshot()["moesaic_control_plane_up"] == 0
        assert await anext(watch) is None
        redis_server.start()

        while await bus_lost(bus):
            await anext(watch)
        assert snapshot()["moesaic_control_plane_up"] == 1
        reading = asyncio.create_task(next_hint(watch))
        while not reading.done():  # entries count from when the watch is back
            await bus.append("s", PlacementHint(epoch=3))
            await asyncio.sleep(0.05)
        assert await reading == PlacementHint(epoch=3)


async def test_whoever_reads_on_has_what_was_there_and_what_comes(bus):
    for epoch in (1, 2, 3):
        await bus.append("s", PlacementHint(epoch=epoch))
    async with aclosing(bus.read_on("s", hints)) as first:
        assert [(await next_of(first)).epoch for _ in range(2)] == [1, 2]

    async with aclosing(bus.read_on("s", hints)) as successor:
        assert [(await next_of(successor)).epoch for _ in range(3)] == [1, 2, 3]
        await bus.append("s", PlacementHint(epoch=4))
        assert (await next_of(successor)).epoch == 4
        await bus.append("s", PlacementHint(epoch=5))
        assert (await next_of(successor)).epoch == 5

    assert [hint.epoch for hint in await bus.latest("s", hints, 2)] == [4, 5]


async def test_reading_on_survives_poison_and_a_redis_that_lost_its_data(bus, redis_server):
    async with aclosing(bus.read_on("s", hints)) as consumed:
        await bus.append("s", PlacementHint(epoch=1))
        await bus.connection.client.xadd(
            "moesaic:{test}:s", {"t": "placement-hint.v1", "p": b"\xc1"}
        )
        await bus.append("s", PlacementHint(epoch=2))
        assert [(await next_of(consumed)).epoch for _ in range(2)] == [1, 2]
        assert await bus.connection.client.xlen("moesaic:{test}:dlq:s") == 1

        redis_server.kill(lose_data=True)
        redis_server.start()
        waiting = asyncio.create_task(next_of(consumed))
        while not waiting.done():
            with suppress(PeerLost):
                await bus.append("s", PlacementHint(epoch=3))
            await asyncio.sleep(0.05)
        assert (await waiting).epoch == 3


async def test_after_an_outage_nothing_is_read_twice_and_nothing_is_missed(bus, redis_server):
    async with aclosing(bus.read_on("s", hints)) as consumed:
        for epoch in (1, 2):
            await bus.append("s", PlacementHint(epoch=epoch))
        assert [(await next_of(consumed)).epoch for _ in range(2)] == [1, 2]
        waiting = asyncio.create_task(next_of(consumed))
        redis_server.kill()
        redis_server.start()
        for epoch in (3, 4):
            while True:
                try:
                    await bus.append("s", PlacementHint(epoch=epoch))
                    break
                except PeerLost:
                    await asyncio.sleep(0.05)
        assert (await waiting).epoch == 3
        assert (await next_of(consumed)).epoch == 4


async def test_a_redis_whose_clock_went_back_is_read_from_its_beginning(bus, redis_server):
    async with aclosing(bus.read_on("s", hints)) as consumed:
        key = "moesaic:{test}:s"
        await bus.append("s", PlacementHint(epoch=1))
        assert (await next_of(consumed)).epoch == 1
        waiting = asyncio.create_task(next_of(consumed))
        redis_server.kill(lose_data=True)
        redis_server.start()
        entry = {"t": "placement-hint.v1", "p": bus.sealed("s", PlacementHint(epoch=2))}
        while True:
            try:
                async with asyncio.timeout(5):
                    await bus.connection.client.xadd(key, entry, id="5-1")
                break
            except (RedisError, OSError):
                await asyncio.sleep(0.05)

        assert (await waiting).epoch == 2


async def test_a_stream_can_be_kept_short(bus):
    for epoch in range(500):
        await bus.append("s", PlacementHint(epoch=epoch), max_entries=10)

    assert (
        await bus.connection.client.xlen("moesaic:{test}:s") < 250
    )  # whole nodes of the stream go
    assert (await bus.latest("s", hints, 1))[0].epoch == 499
