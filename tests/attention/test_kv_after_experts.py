"""KV of a GPU is taken once experts are placed, and waits for nothing where that cannot matter."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import server_programs
from moesaic.cluster.registry import Fleet, registered
from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.cluster.same_weights import same_weights
from moesaic.cluster.service import Process
from moesaic.messages.placement import PlacedWorker, Placement, PlacementHint
from moesaic.messages.registry import WorkerRecord
from moesaic.services.attention.modes.expert_workers import (
    KV_SECOND,
    PLACING,
    RETURN_S,
    awaited_workers,
    experts_placed,
)
from moesaic.services.attention.settings import AttentionSettings
from tests.redis_servers import RedisServers


@pytest.fixture
async def bus(redis_servers: RedisServers) -> AsyncIterator[Bus]:
    with redis_servers.lent(server_programs()[0]) as server:
        async with Bus.connect(server.url, "test") as bus:
            yield bus


def record(worker_id: str, generation: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        generation=generation,
        role="expert",
        state="starting",
        admin_address="h:1",
        data_address="h:2",
    )


def placed_on(*workers: WorkerRecord, epoch: int = 1, digest: str = "mine") -> Placement:
    return Placement(
        epoch=epoch,
        model_digest=digest,
        num_experts=2,
        workers=[PlacedWorker.of(each) for each in workers],
        layers=[0],
        slots=[[[0, 1] for _ in workers]],
    )


async def publish(bus: Bus, epoch: int, digest: str, *workers: WorkerRecord) -> None:
    placement = placed_on(*workers, epoch=epoch, digest=digest)
    pointer = await bus.get_bytes("placement:current")
    assert await bus.compare_and_set(
        {"placement:current": pointer},
        {
            "placement:current": b"%d" % epoch,
            f"placement:{epoch}": bus.sealed(f"placement:{epoch}", placement),
        },
    )
    await bus.append("ctl:placement", PlacementHint(epoch=epoch))


def worker(bus: Any, **settings: Any) -> Any:
    status = ServiceStatus("attention", "a0", 1)
    parts = AsyncExitStack()
    process = SimpleNamespace(status=status, bus=bus, parts=parts, enter=parts.enter_async_context)
    process.agree_on_weights = partial(Process.agree_on_weights, process)
    return SimpleNamespace(
        settings=AttentionSettings(**{"model": "m", "device": "cuda", **settings}),
        process=process,
        config=SimpleNamespace(digest="mine"),
    )


async def test_a_gpu_worker_waits_for_a_placement_of_its_model_and_says_so(bus: Bus) -> None:
    waiting = worker(bus)
    status = waiting.process.status

    placed = asyncio.create_task(experts_placed(waiting))
    while status.waiting_for != [PLACING]:
        await asyncio.sleep(0)
    await publish(bus, 1, "another")
    assert not placed.done()
    await publish(bus, 2, "mine")
    await placed

    assert status.waiting_for == []
    await experts_placed(waiting)  # as one that restarts
    await waiting.process.parts.aclose()


async def test_a_placement_of_workers_that_have_ended_is_none(bus: Bus) -> None:
    """As after all processes of a cluster have started again, with the data of Redis."""
    waiting = worker(bus)
    await publish(bus, 1, "mine", record("e0", 1))

    placed = asyncio.create_task(experts_placed(waiting))
    await asyncio.sleep(0.5)
    gone = f"e0, with experts of epoch 1: {KV_SECOND}"
    assert waiting.process.status.waiting_for == [gone]
    async with registered(bus, record("e0", 2)):
        await asyncio.sleep(0.5)
        assert not placed.done()
        await publish(bus, 2, "mine", record("e0", 2))
        async with asyncio.timeout(10):
            await placed
    await waiting.process.parts.aclose()


@pytest.mark.parametrize(
    ("alive", "held", "later"),
    [
        ([("e0", 1), ("e1", 1)], True, True),
        ([("e0", 1)], False, True),  # the other may come back
        ([("e0", 1), ("e1", 2)], False, False),  # the other has, and needs memory
        ([], False, False),
    ],
)
def test_workers_that_are_gone_are_awaited_for_a_while_if_others_serve(
    alive: list[tuple[str, int]], held: bool, later: bool
) -> None:
    placement, fleet = placed_on(record("e0", 1), record("e1", 1)), Fleet()
    fleet.workers = {name: record(name, generation) for name, generation in alive}

    assert (awaited_workers(placement, fleet, 0.0) == []) == held
    assert (awaited_workers(placement, fleet, RETURN_S) == []) == later


async def test_a_worker_of_another_model_waits_for_no_experts_in_its_cluster(bus: Bus) -> None:
    waiting = worker(bus)
    status, others = waiting.process.status, waiting.settings.weights_of("another")

    async with waiting.process.parts, same_weights(bus, others, []):
        placed = asyncio.create_task(experts_placed(waiting))
        while not status.waiting_for:
            await asyncio.sleep(0)

        [awaited] = status.waiting_for
        assert "the weights of this cluster" in awaited
        placed.cancel()


async def test_workers_of_another_model_wait_for_one_that_waits_for_its_experts(bus: Bus) -> None:
    waiting, other = worker(bus), worker(bus)
    other.config.digest = "another"

    async with waiting.process.parts, other.process.parts:
        with capture_logs() as logs:
            placed = asyncio.create_task(experts_placed(waiting))
            while waiting.process.status.waiting_for != [PLACING]:
                await asyncio.sleep(0)
        beside = asyncio.create_task(experts_placed(other))
        while not other.process.status.waiting_for:
            await asyncio.sleep(0)

        assert [log["waiting_for"] for log in logs if log["event"] == "kv.waiting"] == [PLACING]
        assert "the weights of this cluster" in other.process.status.waiting_for[0]
        placed.cancel()
        beside.cancel()


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"kv_blocks": 64}])
async def test_others_wait_for_nobody(settings: dict[str, Any]) -> None:
    await experts_placed(worker(None, **settings))
