"""Documents in Redis: typed, sealed, compared and set."""

import asyncio

import msgspec

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.security.credentials import Credentials
from moesaic.messages.placement import PlacementHint
from moesaic.telemetry.metrics import snapshot

hints: "msgspec.msgpack.Decoder[PlacementHint]" = msgspec.msgpack.Decoder(PlacementHint)


async def test_documents_keep_their_type_and_can_expire(bus):
    await bus.put("a", PlacementHint(epoch=1))
    await bus.put("b", PlacementHint(epoch=2), ttl_s=60)

    a, none, b = await bus.get_written(["a", "none", "b"], hints)
    assert (a[0], none, b[0]) == (PlacementHint(epoch=1), None, PlacementHint(epoch=2))
    assert 0 < a[1] < b[1]
    assert 0 <= bus.age_s(b[1]) < 60
    assert await bus.connection.client.ttl("moesaic:{test}:b") > 0
    await bus.delete("a")
    assert await bus.get("a", hints) is None


async def test_a_document_that_cannot_be_read_is_as_good_as_none(bus):
    garbage = bus.connection.seals.seal("a", b"\xc1garbage")
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
        await bus.connection.client.set("moesaic:{test}:a", forged)
        assert await bus.get("a", hints) is None
    assert snapshot()['moesaic_redis_refused_total{what="document"}'] == before + 6

    await bus.connection.client.set("moesaic:{test}:a", bus.sealed("a", PlacementHint(epoch=1)))
    assert await bus.get("a", hints) == PlacementHint(epoch=1)


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
