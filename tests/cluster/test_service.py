"""The preamble of services."""

import asyncio
import socket
from typing import Any

import pytest

from moesaic.cluster.lifecycle import stop_event
from moesaic.cluster.registry import watch_fleet
from moesaic.cluster.service import Availability, Identity, joined, listening, service
from moesaic.settings import ServiceSettings

EXPERT = Identity("expert", "expert-0")


def no_calls(server: Any) -> None:
    """A service that adds none of its own."""


async def test_a_process_has_joined_with_a_name_of_its_own_and_leaves_last_part_first(
    redis_server: Any,
) -> None:
    settings, ended = ServiceSettings(redis_url=redis_server.url), []
    async with (
        stop_event() as stop,
        service(settings, EXPERT, no_calls, stop) as process,
        watch_fleet(process.bus) as fleet,
    ):
        process.parts.callback(lambda: ended.append(list(fleet.workers)))
        await process.registered("starting", layers=[1, 2])
        while "expert-0" not in fleet.workers:
            await fleet.changed()
        record = fleet.workers["expert-0"]
        process.parts.callback(lambda: ended.append("first"))

    assert process.settings.worker_id == "expert-0"
    assert (record.role, record.state, record.layers) == ("expert", "starting", [1, 2])
    assert record.generation == process.generation == process.status.generation > 0
    assert record.node == socket.gethostname()
    assert record.metrics_address == process.status.metrics_address != ""
    assert ended[0] == "first"


async def test_a_start_that_waits_for_redis_can_be_stopped(unused_tcp_port: int) -> None:
    settings = ServiceSettings(redis_url=f"redis://127.0.0.1:{unused_tcp_port}/0")
    waited_for: list[str] = []
    async with stop_event() as stop, listening(settings, EXPERT, no_calls, stop) as process:

        async def stop_soon() -> None:
            while not process.status.waiting_for:
                await asyncio.sleep(0.01)
            waited_for.extend(process.status.waiting_for)
            stop.set()

        stopping = asyncio.create_task(stop_soon())
        async with joined(process):
            pytest.fail("it has joined without Redis")

    await stopping
    assert stop.cut_short
    assert "redis" in waited_for[0].lower()


@pytest.mark.parametrize("drained_before", [True, False])
async def test_a_worker_that_was_drained_while_it_started_takes_no_work(
    redis_server: Any, drained_before: bool
) -> None:
    settings, told = ServiceSettings(redis_url=redis_server.url), []
    async with stop_event() as stop, service(settings, EXPERT, no_calls, stop) as process:
        lease = await process.registered("starting")
        if drained_before:
            process.status.set_state("draining")
        availability = Availability(process, lease, told.append)

        await availability.begin()
        state, told_at_start = lease.record.state, list(told)
        stopped = asyncio.create_task(availability.ended())
        await asyncio.sleep(0)
        stop.set()
        await stopped

    assert state == ("draining" if drained_before else "ready")
    assert told_at_start == ([True] if drained_before else [])
    assert told[-1] is True
    assert lease.record.state == process.status.state == "draining"
