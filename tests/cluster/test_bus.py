import asyncio
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import pytest
from redis.exceptions import RedisError

from moesaic.cluster.bus import Bus
from moesaic.cluster.credentials import Credentials
from moesaic.cluster.redis_clients import check_redis, outages
from moesaic.errors import InvalidInput, NotReady, PeerLost
from moesaic.messages.placement import PlacementHint
from moesaic.telemetry.metrics import snapshot

hints: "msgspec.msgpack.Decoder[PlacementHint]" = msgspec.msgpack.Decoder(PlacementHint)


async def next_hint(watch: Any) -> PlacementHint:
    async for hint in watch:
        if hint is not None:
            return hint
    raise AssertionError("a watch never ends")


async def test_documents_keep_their_type_and_can_expire(bus):
    await bus.put("a", PlacementHint(epoch=1))
    await bus.put("b", PlacementHint(epoch=2), ttl_s=60)

    a, none, b = await bus.get_written(["a", "none", "b"], hints)
    assert (a[0], none, b[0]) == (PlacementHint(epoch=1), None, PlacementHint(epoch=2))
    assert 0 < a[1] < b[1]
    assert 0 <= bus.age_s(b[1]) < 60
    assert await bus._writer.ttl("moesaic:{test}:b") > 0
    await bus.delete("a")
    assert await bus.get("a", hints) is None


async def test_a_document_that_cannot_be_read_is_as_good_as_none(bus):
    garbage = bus._seals.seal("a", b"\xc1garbage")
    await bus.compare_and_set({"a": None}, {"a": garbage})

    assert await bus.get("a", hints) is None


async def test_what_nobody_of_the_cluster_wrote_is_as_good_as_none(bus, redis_server):
    before = snapshot().get('moesaic_redis_refused_total{what="document"}', 0)
    plain = msgspec.msgpack.encode(PlacementHint(epoch=1))
    elsewhere = bus.sealed("b", PlacementHint(epoch=1))
    async with Bus.connect(redis_server.url, "test", credentials=Credentials(b"other")) as other:
        another_secret = other.sealed("a", PlacementHint(epoch=1))
    changed = bytearray(bus.sealed("a", PlacementHint(epoch=1)))
    changed[-1] ^= 1
    for forged in (b"", b"\x01", plain, elsewhere, another_secret, bytes(changed)):
        await bus._writer.set("moesaic:{test}:a", forged)
        assert await bus.get("a", hints) is None
    assert snapshot()['moesaic_redis_refused_total{what="document"}'] == before + 6

    await bus._writer.set("moesaic:{test}:a", bus.sealed("a", PlacementHint(epoch=1)))
    assert await bus.get("a", hints) == PlacementHint(epoch=1)


async def test_an_entry_that_nobody_of_the_cluster_appended_goes_to_the_dead_letters(bus):
    key, plain = "moesaic:{test}:s", msgspec.msgpack.encode(PlacementHint(epoch=6))
    async with aclosing(bus.watch("s", hints)) as watch, aclosing(bus.read_on("s", hints)) as all_:
        await anext(watch)
        await bus._writer.xadd(key, {"t": "placement-hint.v1", "p": plain})
        elsewhere = bus.sealed("another stream", PlacementHint(epoch=6))
        await bus._writer.xadd(key, {"t": "placement-hint.v1", "p": elsewhere})
        await bus.append("s", PlacementHint(epoch=1))

        assert await next_hint(watch) == await next_of(all_) == PlacementHint(epoch=1)
    assert await bus.latest("s", hints, 3) == [PlacementHint(epoch=1)]
    assert await bus._writer.xlen("moesaic:{test}:dlq:s") == 2


async def test_who_reads_on_is_given_once_what_somebody_appends_again(bus, redis_server):
    key = "moesaic:{test}:s"
    for epoch in (1, 2):
        await bus.append("s", PlacementHint(epoch=epoch))
    for _, fields in await bus._writer.xrange(key):  # all of it, once more
        await bus._writer.xadd(key, fields)
    async with Bus.connect(redis_server.url, "test") as another:
        await another.append("s", PlacementHint(epoch=3))

    async with aclosing(bus.read_on("s", hints)) as read:
        assert [(await next_of(read)).epoch for _ in range(3)] == [1, 2, 3]


async def test_clusters_on_one_redis_do_not_see_each_other(bus, redis_server):
    await bus.put("a", PlacementHint(epoch=1))

    async with Bus.connect(redis_server.url, "other") as other:
        assert await other.get("a", hints) is None


async def test_compare_and_set_sets_all_or_nothing(bus):
    assert await bus.compare_and_set({"p": None}, {"p": b"1", "d": b"x"})
    assert not await bus.compare_and_set({"p": None}, {"p": b"2", "d": b"y"})
    assert await bus.get_bytes("d") == b"x"
    assert await bus.compare_and_set({"p": b"1", "q": None}, {"p": b"2", "d": None})
    assert await bus.get_bytes("p") == b"2"
    assert await bus.get_bytes("d") is None


async def test_of_many_who_compare_and_set_at_once_one_wins(bus):
    won = await asyncio.gather(
        *(bus.compare_and_set({"p": None}, {"p": b"%d" % i}) for i in range(8))
    )

    assert sum(won) == 1
    assert await bus.get_bytes("p") == b"%d" % won.index(True)


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
        sealed = bus._seals.seal("s", b"\xc1" * 9000)
        poison = await bus._writer.xadd(key, {"t": "placement-hint.v1", "p": sealed})
        await bus._writer.xadd(key, {"other": "fields"})
        await bus.append("s", PlacementHint(epoch=2))

        assert await next_hint(one) == await next_hint(two) == PlacementHint(epoch=2)
    dead = await bus._writer.xrange("moesaic:{test}:dlq:s")
    assert dead[0][0] == poison
    assert len(dead) == 2
    assert len(dead[0][1][b"p"]) == 4096
    assert snapshot()['moesaic_stream_dead_letters_total{stream="s"}'] == before + 4


async def test_an_entry_of_a_newer_version_is_a_reason_to_look_not_a_dead_letter(bus):
    async with aclosing(bus.watch("new", hints)) as watch:
        await anext(watch)
        later = msgspec.msgpack.encode({"type": "placement-hint.v2", "epoch": "II"})
        payload = bus._seals.seal("new", later)
        await bus._writer.xadd("moesaic:{test}:new", {"t": "placement-hint.v2", "p": payload})

        assert await anext(watch) is None
    assert await bus._writer.xlen("moesaic:{test}:dlq:new") == 0


async def test_old_entries_are_trimmed_by_their_age(bus):
    key = "moesaic:{test}:s"
    for i in range(300):
        await bus._writer.xadd(key, {"p": b""}, id=f"{1000 + i}-0")

    await bus.append("s", PlacementHint(epoch=1))
    await bus.append("s", PlacementHint(epoch=2))

    assert await bus._writer.xlen(key) < 300


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


async def bus_lost(bus: Bus) -> bool:
    try:
        await bus.get_bytes("any")
    except PeerLost:
        return True
    return False


async def test_a_redis_that_hangs_fails_the_command_and_nothing_is_repeated(bus, redis_server):
    await bus.append("s", PlacementHint(epoch=1))
    redis_server.pause()
    with pytest.raises(PeerLost, match="no answer in time"):
        await bus.append("s", PlacementHint(epoch=2))
    redis_server.resume()

    await bus.append("s", PlacementHint(epoch=3))
    entries = await bus._writer.xrange("moesaic:{test}:s")
    sealed = [bus._seals.open("s", fields[b"p"]).message for _, fields in entries]
    epochs = [msgspec.msgpack.decode(message)["epoch"] for message in sealed]
    assert epochs in ([1, 2, 3], [1, 3])


async def test_a_redis_without_memory_refuses_writes_and_is_usable_again(bus):
    await bus._writer.config_set("maxmemory", 1)
    with pytest.raises(PeerLost, match="maxmemory"):
        await bus.put("a", PlacementHint(epoch=1))
    await bus._writer.config_set("maxmemory", 0)

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
    await bus._writer.config_set("requirepass", "right")
    try:
        with pytest.raises(InvalidInput, match="refuses these credentials") as refused:
            await check_redis(redis_server.url.replace("unix://", "unix://:canary@"))
        assert "canary" not in str(refused.value)
        await check_redis(redis_server.url.replace("unix://", "unix://:right@"))
    finally:
        await bus._writer.config_set("requirepass", "")


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


async def next_of(consumed: Any) -> PlacementHint:
    async for hint in consumed:
        if hint is not None:
            return hint
    raise AssertionError("a consumer never ends")


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
        await bus._writer.xadd("moesaic:{test}:s", {"t": "placement-hint.v1", "p": b"\xc1"})
        await bus.append("s", PlacementHint(epoch=2))
        assert [(await next_of(consumed)).epoch for _ in range(2)] == [1, 2]
        assert await bus._writer.xlen("moesaic:{test}:dlq:s") == 1

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
                    await bus._writer.xadd(key, entry, id="5-1")
                break
            except (RedisError, OSError):
                await asyncio.sleep(0.05)

        assert (await waiting).epoch == 2


async def test_a_stream_can_be_kept_short(bus):
    for epoch in range(500):
        await bus.append("s", PlacementHint(epoch=epoch), max_entries=10)

    assert await bus._writer.xlen("moesaic:{test}:s") < 250  # whole nodes of the stream go
    assert (await bus.latest("s", hints, 1))[0].epoch == 499


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("failing", [False, True])
async def test_a_task_that_is_cancelled_in_a_command_ends(rounds: int, failing: bool) -> None:
    sent = asyncio.Event()

    async def send() -> None:
        await sent.wait()
        if failing:
            raise OSError

    async def work() -> None:
        with suppress(PeerLost), outages("redis://localhost"):
            await asyncio.wait_for(send(), 10)  # as redis-py sends
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    sent.set()
    for _ in range(rounds):  # of the loop: in one of them the command ends as the request comes
        await asyncio.sleep(0)
    task.cancel()

    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()
