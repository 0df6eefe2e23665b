import asyncio

import msgspec
import pytest

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.seals import Seals
from moesaic.cluster.registry import (
    Fleet,
    leased,
    next_generation,
    registered,
    tidy_index,
    watch_fleet,
)
from moesaic.cluster.security.credentials import Credentials, using
from moesaic.errors import InvalidInput
from moesaic.messages.registry import Generation, WorkerRecord
from moesaic.messages.wire import PROTOCOL


@pytest.fixture(autouse=True)
def frequent_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cluster.registry.RENEW_S", 0.1)


async def until(fleet: Fleet, holds) -> None:
    while not holds(fleet):
        await fleet.changed()


async def test_a_registered_worker_is_seen_its_changes_too_and_its_end(bus, record):
    async with watch_fleet(bus) as fleet:
        assert not fleet.stale
        async with registered(bus, record()) as lease:
            await until(fleet, lambda f: "expert-0" in f.workers)
            await lease.update(state="ready", data_address="h:2")
            await until(fleet, lambda f: f.workers["expert-0"].data_address == "h:2")
            assert fleet.workers["expert-0"].state == "ready"
        await until(fleet, lambda f: not f.workers)


async def test_a_worker_that_does_not_renew_is_dropped(bus, record):
    async with watch_fleet(bus) as fleet:
        await bus.add_member("workers", "expert-0")
        await bus.put("worker:expert-0", record(), ttl_s=600)
        await until(fleet, lambda f: "expert-0" in f.workers)

        await bus.connection.client.pexpire(bus.connection.key("worker:expert-0"), 1)
        await until(fleet, lambda f: not f.workers)


async def test_a_reader_that_remembers_the_version_misses_no_change(bus, record):
    async with watch_fleet(bus) as fleet:
        seen = fleet.version
        async with registered(bus, record()):
            await until(fleet, lambda f: f.workers)

            await fleet.changed(seen)  # it was before we asked


async def test_a_record_that_nobody_renews_ends_no_process(bus, record, monkeypatch):
    """Not even one of a later start, which never ends by itself."""
    monkeypatch.setattr("moesaic.cluster.registry.RENEW_S", 0.02)
    monkeypatch.setattr("moesaic.cluster.registry.LEASE_S", 1)
    async with registered(bus, record(generation=1)), watch_fleet(bus) as fleet:
        await bus.put("worker:expert-0", record(generation=1 << 52))
        await fleet.refresh(bus)
        assert fleet.workers["expert-0"].generation == 1 << 52
        await until(fleet, lambda f: [r.generation for r in f.workers.values()] == [1])


async def test_the_old_start_of_a_worker_gives_way_to_the_new(bus, record):
    async def hold(generation: int) -> None:
        async with registered(bus, record(generation=generation)):
            await asyncio.Event().wait()

    old = asyncio.create_task(hold(1))
    while not await bus.members("workers"):
        await asyncio.sleep(0.01)
    async with registered(bus, record(generation=2)):
        with pytest.raises(ExceptionGroup) as caught:
            await old

        (error,) = caught.value.exceptions
        assert isinstance(error, InvalidInput)
        assert "give each process its own --worker-id" in str(error)
        async with watch_fleet(bus) as fleet:
            assert fleet.workers["expert-0"].generation == 2


async def test_redis_may_lose_everything_and_nobody_is_dropped(bus, record, redis_server):
    async with watch_fleet(bus) as fleet, registered(bus, record()) as lease:
        await until(fleet, lambda f: f.workers)
        redis_server.kill(lose_data=True)
        await until(fleet, lambda f: f.stale)
        assert list(fleet.workers) == ["expert-0"]
        await lease.update(state="ready")  # while nobody can hear it
        redis_server.start()

        await until(fleet, lambda f: f.workers["expert-0"].state == "ready")
        assert not fleet.stale


async def test_services_start_while_redis_is_gone_and_register_when_it_is_back(
    bus, record, redis_server
):
    redis_server.kill()
    async with watch_fleet(bus) as fleet, registered(bus, record()):
        assert fleet.stale
        redis_server.start()

        await until(fleet, lambda f: f.workers)


async def test_generations_grow_even_if_redis_forgets_them(bus, redis_server):
    first = await next_generation(bus, "expert-0")
    second = await next_generation(bus, "expert-0")
    name = "generation:expert-1"
    await bus.put(name, Generation(generation=9999999999))

    assert first < second
    assert await next_generation(bus, "expert-1") == 10_000_000_000
    await bus.connection.client.set("moesaic:{test}:generation:expert-1", b"9" * 4000)  # not by us
    assert await next_generation(bus, "expert-1") < 10_000_000_000
    assert first > 1_700_000_000  # the time of day is its floor, so a lost counter does not matter


async def test_starts_at_the_same_moment_get_different_generations(bus, redis_server):
    async with Bus.connect(redis_server.url, "test") as other:
        numbers = await asyncio.gather(
            *(next_generation(one, "expert-0") for one in (bus, other) for _ in range(5))
        )

    assert len(set(numbers)) == 10


async def test_a_restart_within_the_old_lease_is_told_at_once(bus, record):
    await bus.add_member("workers", "expert-0")
    await bus.put("worker:expert-0", record(generation=1), ttl_s=60)
    async with watch_fleet(bus) as fleet:
        assert fleet.workers["expert-0"].generation == 1
        async with registered(bus, record(generation=2)):
            await until(fleet, lambda f: f.workers["expert-0"].generation == 2)


async def put_back(bus, name: str, value: bytes) -> None:
    """As somebody does who has a password of Redis, and not the secret."""
    await bus.connection.client.set(f"moesaic:{{test}}:worker:{name}", value)


async def test_an_old_record_that_is_put_back_is_not_believed(bus, record, monkeypatch):
    key = "moesaic:{test}:worker:expert-0"
    fleet = Fleet()
    await bus.add_member("workers", "expert-0")
    old = []
    for generation, state in ((1, "ready"), (2, "starting"), (2, "ready"), (2, "draining")):
        await bus.put("worker:expert-0", record(generation=generation, state=state))
        old.append(await bus.connection.client.get(key))
        await fleet.refresh(bus)
    last = old.pop()

    for value in old:
        await put_back(bus, "expert-0", value)
        await fleet.refresh(bus)
        assert not fleet.workers  # as if it was deleted: it is back when it renews its lease
    await put_back(bus, "expert-0", last)
    await fleet.refresh(bus)
    assert fleet.workers["expert-0"].state == "draining"

    later = bus.connection.seals._clock() + 307  # a reader that never saw it finds it minutes later
    monkeypatch.setattr(bus.connection.seals, "_clock", lambda: later)
    newcomer = Fleet()
    await newcomer.refresh(bus)
    assert not newcomer.workers
    with using(Credentials(skew_s=600)):  # it may be as well that the writer's clock is behind
        await newcomer.refresh(bus)
    assert newcomer.workers.keys() == {"expert-0"}


async def test_a_record_under_anothers_name_or_of_a_stranger_is_not_believed(bus, record):
    await bus.add_member("workers", "expert-0")
    await bus.put("worker:expert-1", record("expert-1"))
    under_another = await bus.connection.client.get("moesaic:{test}:worker:expert-1")
    sealed_by_another = Seals(b"another secret", "test").seal("worker:expert-0", b"")
    renamed = bus.sealed("worker:expert-0", record("expert-1"))  # by a worker of the cluster
    fleet = Fleet()
    for forged in (under_another, sealed_by_another, renamed, b"garbage"):
        await put_back(bus, "expert-0", forged)
        await fleet.refresh(bus)
        assert not fleet.workers


async def test_a_worker_whose_lease_was_destroyed_takes_it_again(bus, record, monkeypatch):
    monkeypatch.setattr("moesaic.cluster.registry.RENEW_S", 0.05)
    async with registered(bus, record(state="ready")), watch_fleet(bus) as fleet:
        await put_back(bus, "expert-0", b"garbage")
        await bus.remove_member("workers", "expert-0")
        await fleet.refresh(bus)
        await until(fleet, lambda f: "expert-0" in f.workers)


async def test_who_has_been_gone_for_a_while_is_taken_out_of_the_index(bus, record, monkeypatch):
    monkeypatch.setattr("moesaic.cluster.registry._TIDY_S", 0.05)
    for name in ("expert-0", "gone-1", "gone-2"):
        await bus.add_member("workers", name)
    async with registered(bus, record()):
        tidying = asyncio.create_task(tidy_index(bus))
        while await bus.members("workers") != ["expert-0"]:
            await asyncio.sleep(0.02)
        assert await leased(bus, ["expert-0", "gone-1"]) == ["expert-0"]
        tidying.cancel()


async def test_a_worker_of_another_protocol_is_named_and_not_used(bus, record):
    newer = record("expert-1", protocol=PROTOCOL + 1, version="9.0.0")
    async with watch_fleet(bus) as fleet, registered(bus, record("expert-0")):
        async with registered(bus, newer):
            await until(fleet, lambda f: f.workers and f.other_protocol)
            assert list(fleet.workers) == ["expert-0"]
            assert fleet.other_protocol == {
                "expert-1": f"not used: expert-1 speaks protocol {PROTOCOL + 1} (moesaic 9.0.0), "
                f"this cluster {PROTOCOL}"
            }
        await until(fleet, lambda f: not f.other_protocol)


async def test_a_worker_is_used_once_it_is_started_again_with_our_protocol(bus, record):
    async with watch_fleet(bus) as fleet:
        async with registered(bus, record(protocol=PROTOCOL + 1)):
            await until(fleet, lambda f: f.other_protocol)
        async with registered(bus, record(generation=2, version="0.0.1")):
            await until(fleet, lambda f: "expert-0" in f.workers)
            assert not fleet.other_protocol


def test_a_record_of_a_version_that_tells_no_protocol_is_of_the_first(record):
    fields = msgspec.to_builtins(record())
    del fields["protocol"]

    assert msgspec.convert(fields, WorkerRecord).protocol == 1
