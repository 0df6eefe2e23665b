"""KV of a GPU is taken once experts are placed, and waits for nothing where that cannot matter."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import server_programs
from moesaic.cluster.registry import Fleet, registered
from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.messages.placement import PlacedWorker, Placement, PlacementHint
from moesaic.messages.registry import WorkerRecord
from moesaic.services.attention.modes.expert_workers import (
    PLACING,
    RETURN_S,
    experts_placed,
    is_held,
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
    return SimpleNamespace(
        settings=AttentionSettings(**{"model": "m", "device": "cuda", **settings}),
        process=SimpleNamespace(status=status, bus=bus),
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


async def test_a_placement_of_workers_that_have_ended_is_none(bus: Bus) -> None:
    """As after all processes of a cluster have started again, with the data of Redis."""
    waiting = worker(bus)
    await publish(bus, 1, "mine", record("e0", 1))

    placed = asyncio.create_task(experts_placed(waiting))
    await asyncio.sleep(0.5)
    assert waiting.process.status.waiting_for == [PLACING]
    async with registered(bus, record("e0", 2)):
        await asyncio.sleep(0.5)
        assert not placed.done()
        await publish(bus, 2, "mine", record("e0", 2))
        async with asyncio.timeout(10):
            await placed


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

    assert is_held(placement, fleet, 0.0) == held
    assert is_held(placement, fleet, RETURN_S) == later


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"kv_blocks": 64}])
async def test_others_wait_for_nobody(settings: dict[str, Any]) -> None:
    await experts_placed(worker(None, **settings))
