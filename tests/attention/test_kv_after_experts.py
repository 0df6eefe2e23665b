"""KV of a GPU is taken once experts are placed, and waits for nothing where that cannot matter."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import server_programs
from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.messages.placement import Placement, PlacementHint
from moesaic.services.attention.modes.expert_workers import PLACING, experts_placed
from moesaic.services.attention.settings import AttentionSettings
from tests.redis_servers import RedisServers


@pytest.fixture
async def bus(redis_servers: RedisServers) -> AsyncIterator[Bus]:
    with redis_servers.lent(server_programs()[0]) as server:
        async with Bus.connect(server.url, "test") as bus:
            yield bus


async def publish(bus: Bus, epoch: int, digest: str) -> None:
    placement = Placement(
        epoch=epoch, model_digest=digest, num_experts=2, workers=[], layers=[0], slots=[[]]
    )
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


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"kv_blocks": 64}])
async def test_others_wait_for_nobody(settings: dict[str, Any]) -> None:
    await experts_placed(worker(None, **settings))
