"""Workers of one cluster have the same weights: the first one's, until none has them."""

import asyncio

import msgspec
import pytest
from structlog.testing import capture_logs

from moesaic.cluster import same_weights as module
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.clients import redis_client
from moesaic.cluster.same_weights import same_weights
from moesaic.cluster.security.credentials import Credentials
from moesaic.messages.registry import Weights

GOOD = Weights(digest="a" * 64, dtype="float32", quantization="none", worker_id="first")
BAD = msgspec.structs.replace(GOOD, digest="b" * 64, worker_id="other")
INT8 = msgspec.structs.replace(GOOD, quantization="int8", worker_id="other")


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_S", 1)
    monkeypatch.setattr(module, "RENEW_S", 0.2)
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.02)


async def test_others_with_the_same_weights_join_at_once(bus: Bus) -> None:
    waiting_for: list[str] = []

    async with same_weights(bus, GOOD, waiting_for), same_weights(bus, GOOD, waiting_for):
        assert waiting_for == []


async def test_of_all_that_come_at_once_only_one_kind_joins(redis_server) -> None:
    joined: list[str] = []

    async def work(own: Weights) -> None:
        async with (
            Bus.connect(redis_server.url, "test") as bus,
            same_weights(bus, own, []),
        ):
            joined.append(own.digest)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(work(own)) for own in [GOOD, BAD] * 4]
    async with asyncio.timeout(20):
        while len(joined) < 4:
            await asyncio.sleep(0.01)
    await asyncio.sleep(2.5)  # over two leases
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert len(joined) == 4
    assert len(set(joined)) == 1


async def test_other_weights_wait_and_say_so_until_nobody_has_the_first(bus: Bus) -> None:
    waiting_for = ["redis"]
    joined = asyncio.Event()

    async def stranger() -> None:
        async with same_weights(bus, BAD, waiting_for):
            joined.set()
            await asyncio.Event().wait()

    with capture_logs() as logs:
        async with same_weights(bus, GOOD, []):
            task = asyncio.create_task(stranger())
            async with asyncio.timeout(20):
                while len(waiting_for) < 2:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1.5)  # longer than a lease that nobody renews
            assert not joined.is_set()
            assert GOOD.digest[:16] in waiting_for[1]
            assert BAD.digest[:16] in waiting_for[1]
        async with asyncio.timeout(20):
            await joined.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert waiting_for == ["redis"]
    told = {"event": "worker.other_weights", "cause": GOOD.unlike(BAD)}
    told |= {"own_digest": BAD.digest, "cluster_digest": GOOD.digest}
    assert [entry for entry in logs if entry["log_level"] == "error"] == [
        {**told, "log_level": "error"}
    ]


async def test_the_same_weights_in_other_numbers_wait_and_name_both_workers(bus: Bus) -> None:
    waiting_for: list[str] = []
    joined = asyncio.Event()

    async def stranger() -> None:
        async with same_weights(bus, INT8, waiting_for):
            joined.set()

    async with same_weights(bus, GOOD, []):
        task = asyncio.create_task(stranger())
        async with asyncio.timeout(20):
            while not waiting_for:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        assert not joined.is_set()
        [said] = waiting_for
    async with asyncio.timeout(20):
        await task

    assert "first has --dtype float32 --quantization none" in said
    assert "other --dtype float32 --quantization int8" in said


@pytest.mark.parametrize("own", [GOOD, INT8])
async def test_a_worker_of_a_version_that_told_no_numbers_is_joined(bus: Bus, own: Weights) -> None:
    old = Weights(digest=GOOD.digest)

    async with asyncio.timeout(20), same_weights(bus, old, []), same_weights(bus, own, []):
        assert await _held(bus) == GOOD.digest


async def test_a_redis_that_lost_its_data_lets_nobody_in_who_was_refused(bus: Bus) -> None:
    waiting_for: list[str] = []
    joined = asyncio.Event()

    async def stranger() -> None:
        async with same_weights(bus, BAD, waiting_for):
            joined.set()

    async with same_weights(bus, GOOD, []):
        task = asyncio.create_task(stranger())
        async with asyncio.timeout(20):
            while not waiting_for:
                await asyncio.sleep(0.01)
        await bus.delete("weights")
        async with asyncio.timeout(20):
            while await _held(bus) != GOOD.digest:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
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
            async with asyncio.timeout(20), same_weights(bus, GOOD, []):
                assert await _held(bus) == GOOD.digest
            await bus.delete("weights")


async def test_a_redis_that_does_not_let_a_worker_join_is_said(redis_server) -> None:
    admin = redis_client(redis_server.url, "test", timeout_s=5.0)
    rules = ["on", ">password", "~*", "+@all", "-get"]  # as of an ACL file without this key
    await admin.execute_command("ACL", "SETUSER", "old", "reset", *rules)
    url = f"{redis_server.url}?username=old&password=password"
    waiting_for: list[str] = []
    async with Bus.connect(url, "test") as bus:

        async def work() -> None:
            async with same_weights(bus, GOOD, waiting_for):
                pass

        task = asyncio.create_task(work())
        async with asyncio.timeout(20):
            while not waiting_for:
                await asyncio.sleep(0.01)
        assert "permissions" in waiting_for[0]
        await admin.execute_command("ACL", "SETUSER", "old", "+get")
        async with asyncio.timeout(20):
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
