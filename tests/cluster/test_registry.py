import asyncio

import pytest

from moesaic.cluster.bus import Bus
from moesaic.cluster.registry import Fleet, next_generation, registered, watch_fleet
from moesaic.errors import InvalidInput


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


async def test_a_worker_that_does_not_renew_is_dropped(bus, record, monkeypatch):
    monkeypatch.setattr("moesaic.cluster.registry.LEASE_S", 1)
    async with watch_fleet(bus) as fleet:
        await bus.add_member("workers", "expert-0")
        await bus.put("worker:expert-0", record(), ttl_s=1)

        await until(fleet, lambda f: "expert-0" in f.workers)
        await until(fleet, lambda f: not f.workers)


async def test_a_reader_that_remembers_the_version_misses_no_change(bus, record):
    async with watch_fleet(bus) as fleet:
        seen = fleet.version
        async with registered(bus, record()):
            await until(fleet, lambda f: f.workers)

            await fleet.changed(seen)  # it was before we asked


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
    await bus.compare_and_set({"generation:expert-1": None}, {"generation:expert-1": b"9999999999"})

    assert first < second
    assert await next_generation(bus, "expert-1") == 10_000_000_000
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
