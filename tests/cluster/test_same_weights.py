"""Workers of one cluster have the same weights: the first one's, until none has them."""

import asyncio

import msgspec
import pytest
from structlog.testing import capture_logs

from moesaic.cluster import same_weights as module
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.connection import redis_client
from moesaic.cluster.same_weights import same_weights
from moesaic.cluster.security.credentials import Credentials
from moesaic.cluster.waiting import Changes
from moesaic.messages.registry import Weights

GOOD = Weights(digest="a" * 64, dtype="float32", quantization="none", worker_id="first")
BAD = msgspec.structs.replace(GOOD, digest="b" * 64, worker_id="other")
LEASE_S = 600
INT8 = msgspec.structs.replace(GOOD, quantization="int8", worker_id="other")


class Clock(Changes):
    """The time of workers that wait to join, who ask for it at least once each time they look."""

    now_s = 0.0

    def __call__(self) -> float:
        self.note_change()
        return self.now_s

    async def asked(self, times: int) -> None:
        end = self.version + times
        while self.version < end:
            await self.changed()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    # No lease ends in Redis, however slow this machine is.
    monkeypatch.setattr(module, "LEASE_S", LEASE_S)
    monkeypatch.setattr(module, "RENEW_S", 0.02)
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.02)


async def test_others_with_the_same_weights_join_at_once(bus: Bus) -> None:
    waiting_for: list[str] = []

    async with same_weights(bus, GOOD, waiting_for), same_weights(bus, GOOD, waiting_for):
        assert waiting_for == []


async def test_a_worker_renews_its_place(bus: Bus) -> None:
    client, name = bus.connection.client, bus.connection.key("weights")
    async with same_weights(bus, GOOD, []):
        await client.expire(name, LEASE_S // 2)

        while await client.ttl(name) <= LEASE_S // 2:
            await asyncio.sleep(0.02)


async def test_of_all_that_come_at_once_only_one_kind_joins(redis_server, clock: Clock) -> None:
    joined: list[str] = []

    async def work(own: Weights) -> None:
        async with (
            Bus.connect(redis_server.url, "test") as bus,
            same_weights(bus, own, [], clock),
        ):
            joined.append(own.digest)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(work(own)) for own in [GOOD, BAD] * 4]
    while len(joined) < 4:
        await clock.asked(1)
    for _ in range(2):
        clock.now_s += 2 * LEASE_S
        await clock.asked(16)  # by the four that wait
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert len(joined) == 4
    assert len(set(joined)) == 1


async def test_other_weights_wait_and_say_so_until_nobody_has_the_first(
    bus: Bus, clock: Clock
) -> None:
    waiting_for = ["redis"]
    joined = asyncio.Event()

    async def stranger() -> None:
        async with same_weights(bus, BAD, waiting_for, clock):
            joined.set()
            await asyncio.Event().wait()

    with capture_logs() as logs:
        async with same_weights(bus, GOOD, []):
            task = asyncio.create_task(stranger())
            await clock.asked(2)
            clock.now_s += 2 * LEASE_S
            await clock.asked(4)
            assert not joined.is_set()
            assert GOOD.digest[:16] in waiting_for[1]
            assert BAD.digest[:16] in waiting_for[1]
        await bus.delete("weights")  # as its expiry does
        await clock.asked(4)
        assert not joined.is_set()
        clock.now_s += LEASE_S + 1
        await joined.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert waiting_for == ["redis"]
    told = {"event": "worker.other_weights", "cause": GOOD.unlike(BAD)}
    told |= {"own_digest": BAD.digest, "cluster_digest": GOOD.digest}
    assert [entry for entry in logs if entry["log_level"] == "error"] == [
        {**told, "log_level": "error"}
    ]


async def test_the_same_weights_in_other_numbers_wait_and_name_both_workers(
    bus: Bus, clock: Clock
) -> None:
    waiting_for: list[str] = []
    joined = asyncio.Event()

    async def stranger() -> None:
        async with same_weights(bus, INT8, waiting_for, clock):
            joined.set()

    async with same_weights(bus, GOOD, []):
        task = asyncio.create_task(stranger())
        await clock.asked(2)
        clock.now_s += 2 * LEASE_S
        await clock.asked(4)
        assert not joined.is_set()
        [said] = waiting_for
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert "first has --dtype float32 --quantization none" in said
    assert "other --dtype float32 --quantization int8" in said


@pytest.mark.parametrize("own", [GOOD, INT8])
async def test_a_worker_of_a_version_that_told_no_numbers_is_joined(bus: Bus, own: Weights) -> None:
    old = Weights(digest=GOOD.digest)

    async with same_weights(bus, old, []), same_weights(bus, own, []):
        assert await _held(bus) == GOOD.digest


async def test_a_redis_that_lost_its_data_lets_nobody_in_who_was_refused(
    bus: Bus, clock: Clock
) -> None:
    waiting_for: list[str] = []
    joined = asyncio.Event()

    async def stranger() -> None:
        async with same_weights(bus, BAD, waiting_for, clock):
            joined.set()

    async with same_weights(bus, GOOD, []):
        task = asyncio.create_task(stranger())
        await clock.asked(2)
        await bus.delete("weights")
        while await _held(bus) != GOOD.digest:
            await asyncio.sleep(0.02)
        await clock.asked(4)
        assert not joined.is_set()
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_place_that_nobody_of_the_cluster_took_keeps_nobody_out(redis_server) -> None:
    async with (
        Bus.connect(redis_server.url, "test", credentials=Credentials(b"ours")) as bus,
        Bus.connect(redis_server.url, "test", credentials=Credentials(b"another's")) as forger,
    ):
        for forged in (b"forged", forger.sealed("weights", BAD)):
            await bus.compare_and_set({"weights": None}, {"weights": forged})
            async with same_weights(bus, GOOD, []):
                assert await _held(bus) == GOOD.digest
            await bus.delete("weights")


async def test_a_redis_that_does_not_let_a_worker_join_is_said(redis_server, clock: Clock) -> None:
    admin = redis_client(redis_server.url, "test", timeout_s=5.0)
    rules = ["on", ">password", "~*", "+@all", "-get"]  # as of an ACL file without this key
    await admin.execute_command("ACL", "SETUSER", "old", "reset", *rules)
    url = f"{redis_server.url}?username=old&password=password"
    waiting_for: list[str] = []
    async with Bus.connect(url, "test") as bus:

        async def work() -> None:
            async with same_weights(bus, GOOD, waiting_for, clock):
                pass

        task = asyncio.create_task(work())
        await clock.asked(2)
        assert "permissions" in waiting_for[0]
        await admin.execute_command("ACL", "SETUSER", "old", "+get")
        await task
    await admin.execute_command("ACL", "DELUSER", "old")
    await admin.aclose()

    assert waiting_for == []


async def _held(bus: Bus) -> str | None:
    try:
        held = await bus.get("weights", msgspec.msgpack.Decoder(Weights))
    except module.PeerLost:
        return None
    return held.digest if held else None
