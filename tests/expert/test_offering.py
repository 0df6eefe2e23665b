"""A worker whose first experts did not fit tells the scheduler how many slots it really has."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import server_programs
from moesaic.cluster.registry import Fleet, registered
from moesaic.experts.host import ExpertHost
from moesaic.messages.registry import WorkerRecord
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.expert.main import offer_what_fits
from moesaic.services.expert.room import SlotRoom
from tests.redis_servers import RedisServers

SLOT = 1000  # bytes in all layers


@pytest.fixture
async def bus(redis_servers: RedisServers) -> AsyncIterator[Bus]:
    with redis_servers.lent(server_programs()[0]) as server:
        async with Bus.connect(server.url, "test") as bus:
            yield bus


@pytest.fixture
def host(tiny_model: Any) -> ExpertHost:
    config = load_config(tiny_model.directory)
    cpu = torch.device("cpu")
    return ExpertHost(Checkpoint(tiny_model.directory), config, "e0", 8, torch.float32, cpu)


@pytest.mark.parametrize(
    ("chosen", "in_force", "slots"), [(False, 0, 4), (True, 0, 8), (False, 3, 8)]
)
async def test_the_record_has_the_slots_that_fit(
    bus: Bus, host: ExpertHost, chosen: bool, in_force: int, slots: int
) -> None:
    record = WorkerRecord(
        worker_id="e0",
        generation=1,
        role="expert",
        state="ready",
        admin_address="h:1",
        slots_per_layer=8,
    )
    room, fleet = SlotRoom(8, 20 * SLOT, SLOT, chosen), Fleet()
    async with registered(bus, record) as lease:
        assert await offer_what_fits(host, room, lease) == room
        host.loader.fitted_bytes, host.epochs.in_force = 5 * SLOT, in_force

        after = await offer_what_fits(host, room, lease)

        await fleet.refresh(bus)
        assert after.slots_per_layer == host.slots_per_layer == slots
        assert fleet.workers["e0"].slots_per_layer == slots
        assert await offer_what_fits(host, after, lease) == after
