"""Workers on standby that are told over gRPC, some of which cannot be."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moesaic.cluster.registry import Fleet, registered
from moesaic.cluster.rpc.server import admin_server
from moesaic.errors import MoesaicError
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.standby import StandbyActuator
from moesaic.settings import ServiceSettings


def resting(name: str, address: str, **fields: Any) -> WorkerRecord:
    known: dict[str, Any] = {"state": "standby", "standing_by": True, "generation": 1} | fields
    return WorkerRecord(worker_id=name, role="attention", admin_address=address, **known)


@asynccontextmanager
async def worker(bus: Any, name: str, told: list[str], **fields: Any) -> AsyncIterator[None]:
    """One on standby that notes when it is told anything."""
    async with admin_server(ServiceSettings(), "attention", worker_id=name) as admin:
        admin.status.stand_by(True)

        async def note() -> None:
            told.append(name)

        admin.on_stand_by(note)
        async with registered(bus, resting(name, admin.address, **fields)):
            yield


async def test_a_worker_that_cannot_be_told_does_not_keep_others_from_it(control: Any) -> None:
    told: list[str] = []
    actuator = StandbyActuator(control.bus, Fleet(), control.view)
    async with (
        registered(control.bus, resting("a0", "127.0.0.1:9")),
        worker(control.bus, "a1", told),
    ):
        with pytest.raises(MoesaicError, match="a0"):
            await actuator.apply(FleetShape(2, 0))

    assert told == ["a1"]


async def test_a_worker_that_operators_drain_is_neither_counted_nor_activated(control: Any) -> None:
    told: list[str] = []
    fleet = Fleet()
    actuator = StandbyActuator(control.bus, fleet, control.view)
    async with (
        worker(control.bus, "a0", told, state="draining", drained=True),
        worker(control.bus, "a1", told),
    ):
        await fleet.refresh(control.bus)
        assert await actuator.most() == FleetShape(1, 0)
        await actuator.apply(FleetShape(1, 0))

    assert told == ["a1"]


async def test_it_is_set_to_the_workers_that_take_work_or_are_about_to(control: Any) -> None:
    fleet = Fleet()
    fleet.workers = {
        record.worker_id: record
        for record in (
            resting("a0", "a0:1"),
            resting("a1", "a1:1", state="ready", standing_by=False),
            resting("a2", "a2:1", state="starting", standing_by=False),
            resting("a3", "a3:1", state="draining", standing_by=False, drained=True),
        )
    }

    assert await StandbyActuator(control.bus, fleet, control.view).intended() == FleetShape(2, 0)
