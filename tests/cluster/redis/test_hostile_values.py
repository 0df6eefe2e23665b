"""No value in Redis, and no entry of a stream, fails a reader: what cannot be read counts as absent."""

import asyncio
import functools
import operator
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.reading import MAX_BYTES, Unreadable, read_message, read_number
from moesaic.cluster.redis.seals import Seals
from moesaic.cluster.security.credentials import Credentials
from moesaic.messages.placement import PlacementHint
from moesaic.messages.registry import Generation
from tests.redis_keys import (
    ATOMS,
    KEYS,
    OTHER_KINDS,
    Key,
    changed,
    parts_of,
    paths,
    plain_values,
    sealed_values,
)
from tests.redis_servers import RedisServers

pytestmark = pytest.mark.usefixtures("patient_with_redis")

SECRET = Credentials(b"the cluster secret")
SEALS, ELSEWHERE = Seals(b"the cluster secret", "test"), Seals(b"another", "test")
LARGEST_ID = f"{(1 << 64) - 1}-{(1 << 64) - 1}"
hints: "msgspec.msgpack.Decoder[PlacementHint]" = msgspec.msgpack.Decoder(PlacementHint)


def decoder_of(key: Key) -> "msgspec.msgpack.Decoder[Any]":
    first, *others = (type(message) for message in key.messages)
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, others, first))


@pytest.fixture
async def bus(redis_servers: RedisServers) -> AsyncIterator[Bus]:
    with redis_servers.lent() as server:
        async with Bus.connect(server.url, "test", credentials=SECRET) as bus:
            yield bus


def values_of(key: Key) -> list[bytes]:
    return plain_values(key.written, SEALS, ELSEWHERE) + sealed_values(key, SEALS)


with_messages = [key for key in KEYS if key.messages]


@pytest.mark.parametrize("key", with_messages, ids=lambda key: key.name)
def test_a_value_is_read_as_a_message_or_counts_as_absent(key: Key) -> None:
    decoder = decoder_of(key)
    for value in values_of(key):
        with pytest.raises(Unreadable):
            read_message(SEALS, key.written, value, decoder)
    for message in key.messages:
        sealed = SEALS.seal(key.written, msgspec.msgpack.encode(message))
        assert read_message(SEALS, key.written, sealed, decoder)[0] == message


@pytest.mark.parametrize("key", with_messages, ids=lambda key: key.name)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_part_of_a_message_may_be_anything(key: Key, data: st.DataObject) -> None:
    decoder, parts = decoder_of(key), parts_of(data.draw(st.sampled_from(key.messages)))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(paths(parts))))
        parts = changed(parts, path, data.draw(st.sampled_from(ATOMS)))
    sealed = SEALS.seal(key.written, msgspec.msgpack.encode(parts))
    try:
        message, _ = read_message(SEALS, key.written, sealed, decoder)
    except Unreadable:
        return
    assert isinstance(message, tuple(type(each) for each in key.messages))


@given(st.binary(max_size=40) | st.from_regex(rb"[0-9]{1,5000}", fullmatch=True))
def test_a_number_is_read_or_counts_as_absent(value: bytes) -> None:
    try:
        number = read_number(value)
    except Unreadable:
        return
    assert int(value) == number <= 1 << 53


async def test_whatever_a_key_holds_it_can_be_replaced(bus: Bus) -> None:
    """A list where a string is expected, as any value that is too large, counts as absent."""
    key = bus.connection.key("worker:x")
    for command, *arguments in (*OTHER_KINDS, ("SET", b"x" * (MAX_BYTES + 1))):
        await bus.connection.client.delete(key)
        await bus.connection.client.execute_command(command, key, *arguments)

        assert await bus.get_bytes("worker:x") is None
        assert await bus.get_written(["worker:x", "worker:y"], hints) == [None, None]
        assert not await bus.compare_and_set({"worker:x": b"1"}, {"worker:x": b"2"})
        assert await bus.compare_and_set({"worker:x": None}, {"worker:x": b"2"})
        assert await bus.get_bytes("worker:x") == b"2"
    assert bus.last_lost == float("-inf")  # nothing of it is an outage


async def test_what_counts_as_absent_is_kept_once_with_the_dead_letters(bus: Bus) -> None:
    box, key = bus.connection.key("dlq:documents"), bus.connection.key("a")
    for number, value in enumerate((b"9" * 9000, b"\xff"), 1):
        await bus.connection.client.set(key, value)
        for _ in range(3):  # readers look again and again
            assert (await bus.get_number("a")).message is None
        letters = await bus.connection.client.xrange(box)
        assert len(letters) == number
        assert letters[-1][1][b"name"] == b"a"
        assert letters[-1][1][b"p"] == value[:4096]


async def test_the_dead_letters_are_bounded(bus: Bus) -> None:
    client = bus.connection.client
    for number in range(1500):
        await client.set(bus.connection.key("a"), b"%d." % number)
        await bus.get("a", hints)

    assert await client.xlen(bus.connection.key("dlq:documents")) < 1300


FULL = ("XADD", LARGEST_ID, "t", "x")
JUST_NOT_FULL = ("XADD", f"{(1 << 64) - 1}-{(1 << 64) - 2}", "t", "x")
BOXES = [("SET", b"x"), *OTHER_KINDS[:1], FULL, JUST_NOT_FULL]


async def letters_in(bus: Bus, box: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    letters: list[tuple[bytes, dict[bytes, bytes]]] = await bus.connection.client.xrange(
        bus.connection.key(f"dlq:{box}")
    )
    return [letter for letter in letters if b"why" in letter[1]]


@pytest.mark.parametrize("command", BOXES, ids=lambda c: f"{c[0]} {str(c[1])[:60]}")
async def test_whatever_is_in_place_of_dead_letters_they_are_kept(
    bus: Bus, command: tuple[Any, ...]
) -> None:
    client, key = bus.connection.client, bus.connection.key
    for box in ("documents", "s"):
        await client.execute_command(command[0], key(f"dlq:{box}"), *command[1:])

    await bus.append("s", PlacementHint(epoch=1))
    async with aclosing(bus.read_on("s", hints)) as read:
        assert await hint_of(read) == PlacementHint(epoch=1)
        for number in range(3):
            await client.set(key("a"), b"%d." % number)
            assert await bus.get("a", hints) is None
            await client.xadd(key("s"), {"p": b"%d." % number})
            assert await anext(read) is None
    for box in ("documents", "s"):
        assert (await letters_in(bus, box))[-1][1][b"p"] == b"2."


@pytest.mark.parametrize("entry_id", [FULL[1], JUST_NOT_FULL[1], f"{1 << 60}-0"])
async def test_an_entry_with_an_id_of_the_future_leaves_room_for_later_letters(
    bus: Bus, entry_id: str
) -> None:
    key = bus.connection.key("s")
    async with aclosing(bus.read_on("s", hints)) as read:
        await bus.connection.client.xadd(key, {"p": b"junk"}, id=entry_id)
        assert await anext(read) is None
        await bus.connection.client.delete(key)
        await bus.append("s", PlacementHint(epoch=1))
        assert await hint_of(read) == PlacementHint(epoch=1)
        poison = await bus.connection.client.xadd(key, {"p": b"later junk"})
        assert await anext(read) is None

    first, second = await letters_in(bus, "s")
    assert first[1][b"id"] == entry_id.encode()
    assert first[1][b"p"] == b"junk"
    assert second[0] == poison


async def test_a_letter_whose_id_has_no_place_any_more_is_kept_behind_the_others(bus: Bus) -> None:
    async with aclosing(bus.read_on("s", hints)) as read:
        # Of long ago: a letter of the same millisecond could have its id by chance.
        poison = await bus.connection.client.xadd(bus.connection.key("s"), {"p": b"junk"}, id="1-1")
        await bus.refuse_entry("s", PlacementHint(epoch=1), "no such epoch")  # by another reader
        assert await anext(read) is None

    assert (await letters_in(bus, "s"))[-1][1][b"id"] == poison


@pytest.mark.parametrize("command", OTHER_KINDS[:1] + OTHER_KINDS[2:], ids=lambda c: c[0])
async def test_a_set_that_is_none_is_made_anew(bus: Bus, command: tuple[Any, ...]) -> None:
    key = bus.connection.key("workers")
    await bus.connection.client.execute_command(command[0], key, *command[1:])

    assert await bus.members("workers") == []
    await bus.add_member("workers", "a")
    assert await bus.members("workers") == ["a"]
    assert bus.last_lost == float("-inf")


async def test_members_that_are_no_names_are_left_out(bus: Bus) -> None:
    key = bus.connection.key("workers")
    await bus.connection.client.sadd(key, "a", b"\xff\xfe", b"x" * 1000, b"", b"a\nb", "b")

    assert set(await bus.members("workers")) - {""} == {"a", "b"}


@pytest.mark.parametrize("command", [*OTHER_KINDS[:4], ("SET", b"x")], ids=lambda c: c[0])
async def test_a_stream_that_is_none_is_made_anew(bus: Bus, command: tuple[Any, ...]) -> None:
    key = bus.connection.key("s")
    await bus.connection.client.execute_command(command[0], key, *command[1:])
    async with aclosing(bus.watch("s", hints)) as watch, aclosing(bus.read_on("s", hints)) as read:
        assert await anext(watch) is None
        assert await anext(read) is None
        assert await bus.latest("s", hints, 9) == []

        await bus.append("s", PlacementHint(epoch=1))
        assert await hint_of(read) == PlacementHint(epoch=1)
        assert await bus.latest("s", hints, 9) == [PlacementHint(epoch=1)]
    assert bus.last_lost == float("-inf")


async def hint_of(entries: Any) -> PlacementHint:
    async for entry in entries:
        if entry is not None:
            found: PlacementHint = entry
            return found
    raise AssertionError("readers never end")


async def test_a_stream_that_ends_with_the_largest_id_goes_on(bus: Bus) -> None:
    key = bus.connection.key("s")
    await bus.append("s", PlacementHint(epoch=1))
    async with aclosing(bus.watch("s", hints)) as watch, aclosing(bus.read_on("s", hints)) as read:
        assert await anext(watch) is None
        assert await hint_of(read) == PlacementHint(epoch=1)
        await bus.connection.client.xadd(key, {"p": b"\xff"}, id=LARGEST_ID)
        assert await anext(watch) is None  # both have seen it
        assert await anext(read) is None

        seen = asyncio.create_task(hint_of(watch))
        await bus.append("s", PlacementHint(epoch=2))
        assert await hint_of(read) == PlacementHint(epoch=2)
        while not seen.done():  # a watch gives what comes after it has looked
            await bus.append("s", PlacementHint(epoch=3))
            await asyncio.sleep(0.02)
    assert bus.last_lost == float("-inf")


async def test_an_id_of_the_future_does_not_keep_a_stream_from_being_trimmed(bus: Bus) -> None:
    key = bus.connection.key("s")
    await bus.connection.client.xadd(key, {"p": b""}, id=f"{1 << 60}-0")
    for epoch in range(5000):
        await bus.append("s", PlacementHint(epoch=epoch))

    assert await bus.connection.client.xlen(key) < 4500


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key.kind == "stream"], ids=lambda key: key.name
)
async def test_every_hostile_entry_is_put_aside_and_the_next_one_is_read(
    bus: Bus, key: Key
) -> None:
    decoder, good = decoder_of(key), key.messages[0]
    fields: list[dict[Any, Any]] = [{"p": value} for value in values_of(key)]
    fields += [{"t": b"\xff", "p": b""}, {"other": b""}, {"p": b"", "t": b"x" * 100_000}]
    async with (
        aclosing(bus.watch(key.name, decoder)) as watch,
        aclosing(bus.read_on(key.name, decoder)) as read,
    ):
        assert await anext(watch) is None
        for each in fields:
            await bus.connection.client.xadd(bus.connection.key(key.name), each)
        await bus.append(key.name, good)

        assert await hint_of(read) == good
        assert await hint_of(watch) == good
    assert await bus.latest(key.name, decoder, 2000) == [good]
    letters = await bus.connection.client.xlen(bus.connection.key(f"dlq:{key.name}"))
    assert letters >= len(fields) - 1


async def test_a_document_of_another_kind_counts_as_absent(bus: Bus) -> None:
    await bus.put("a", Generation(generation=1))

    assert await bus.get("a", hints) is None
