"""What ``moesaic status`` learns from a real scheduler."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moesaic.cli.clients.fleet import gather_facts, service_facts
from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.cli.suite.child import Child
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.registry import registered
from moesaic.messages.registry import WorkerRecord

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """Admin address of a running scheduler, and the address of its Redis."""
    redis, url = start_redis(tmp_path / "redis")
    with hold_port("127.0.0.1") as held:
        address = f"127.0.0.1:{number_of(held)}"
    flags = ["--worker-id", "scheduler", "--admin-port", address.rpartition(":")[2]]
    child = await Child.start(
        [sys.executable, "-m", "moesaic.services.scheduler", *flags],
        {**os.environ, "REDIS_URL": url, "PYTHONPATH": f"{ROOT}:{ROOT / 'libs'}"},
        tmp_path / "scheduler.log",
    )
    while (await service_facts("scheduler", "scheduler", address))["state"] != "ready":
        assert child.running, (tmp_path / "scheduler.log").read_text()
        await asyncio.sleep(0.05)
    yield address, url
    await child.stop(grace_s=10)
    redis.send_signal(signal.SIGTERM)
    redis.wait()


async def test_services_show_what_they_are_and_wait_for(scheduler: tuple[str, str]) -> None:
    address, redis_url = scheduler
    lost = WorkerRecord(
        worker_id="expert-7",
        generation=3,
        role="expert",
        state="ready",
        admin_address="127.0.0.1:1",
        slots_per_layer=4,
    )
    async with Bus.connect(redis_url, "default") as bus, registered(bus, lost):
        while True:
            facts, placement = await gather_facts({}, address)
            by_id = {service["id"]: service for service in facts}
            if {"scheduler", "expert-7"} <= set(by_id):
                break
            await asyncio.sleep(0.05)

    assert by_id["scheduler"]["state"] == "ready"
    assert by_id["scheduler"]["pid"] > 0
    assert by_id["expert-7"]["state"] == "unreachable"
    assert by_id["expert-7"]["waiting_for"] == ["unavailable"]
    assert placement is None


async def test_without_a_scheduler_the_known_services_are_shown() -> None:
    facts, placement = await gather_facts({"expert-0": ("expert", "127.0.0.1:1")}, "127.0.0.1:1")

    assert [(service["id"], service["state"]) for service in facts] == [("expert-0", "unreachable")]
    assert placement is None
