"""Workers on standby: told over gRPC, seen in the registry, and without work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moesaic.cluster.lifecycle import stop_event
from moesaic.cluster.registry import lease_key
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.service import Availability, Identity, service
from moesaic.messages.registry import WorkerRecord
from moesaic.settings import ServiceSettings
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc

ATTENTION = Identity("attention", "attention-0")
_records = msgspec.msgpack.Decoder(WorkerRecord)


class Worker:
    """A worker whose work ends when a test says so."""

    def __init__(self, process: Any, stub: Any, health: Any) -> None:
        self.process, self.stub, self.health = process, stub, health
        self.idle = False
        self.refusing: list[bool] = []

    async def is_idle(self) -> bool:
        return self.idle

    async def registered(self) -> WorkerRecord:
        """Its record, as all others see it."""
        found = await self.process.bus.get(lease_key(ATTENTION.worker_id), _records)
        assert found is not None
        return found

    async def until(self, state: str) -> None:
        while (await self.registered()).state != state:
            await asyncio.sleep(0.02)
        assert self.process.status.state == state


@asynccontextmanager
async def working(redis: Any, *, standby: bool = False) -> AsyncIterator[Worker]:
    settings = ServiceSettings(redis_url=redis.url)
    async with (
        stop_event() as stop,
        service(settings, ATTENTION, lambda server: None, stop) as process,
        channel(process.admin.address) as connection,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        worker = Worker(process, stub, health_pb2_grpc.HealthStub(connection))
        worker.idle = standby
        lease = await process.registered("starting")
        availability = Availability(process, lease, worker.refusing.append, worker.is_idle)
        await availability.begin(standby=standby)
        yield worker


async def test_a_worker_stands_by_once_its_work_has_ended_and_is_activated_again(
    redis_server: Any,
) -> None:
    async with working(redis_server) as worker:
        answer = await worker.stub.StandBy(pb.StandByRequest())
        assert answer.state == pb.SERVICE_STATE_DRAINING
        record = await worker.registered()
        assert (record.state, record.standing_by) == ("draining", True)
        assert worker.refusing == [True]

        worker.idle = True
        await worker.until("standby")
        await worker.stub.StandBy(pb.StandByRequest())
        assert (await worker.registered()).state == "standby"
        assert worker.refusing == [True]

        answer = await worker.stub.Activate(pb.ActivateRequest())
        assert answer.state == pb.SERVICE_STATE_READY
        record = await worker.registered()
        assert (record.state, record.standing_by) == ("ready", False)
        assert worker.refusing == [True, False]


async def test_a_worker_that_begins_on_standby_takes_no_work_and_is_healthy(
    redis_server: Any,
) -> None:
    async with working(redis_server, standby=True) as worker:
        assert (await worker.registered()).state == "standby"
        assert worker.refusing == [True]
        serving = health_pb2.HealthCheckResponse.SERVING
        while (await worker.health.Check(health_pb2.HealthCheckRequest())).status != serving:
            await asyncio.sleep(0.02)


async def test_an_operators_drain_wins_over_activation(redis_server: Any) -> None:
    async with working(redis_server, standby=True) as worker:
        await worker.stub.Drain(pb.DrainRequest())
        answer = await worker.stub.Activate(pb.ActivateRequest())
        assert answer.state == pb.SERVICE_STATE_DRAINING
        record = await worker.registered()
        assert (record.state, record.drained) == ("draining", True)

        await worker.stub.Undrain(pb.UndrainRequest())
        record = await worker.registered()
        assert (record.state, record.drained) == ("ready", False)
        assert worker.refusing[-1] is False


async def test_a_drained_worker_that_is_told_to_stand_by_does_so_when_the_drain_ends(
    redis_server: Any,
) -> None:
    async with working(redis_server) as worker:
        worker.idle = True
        await worker.stub.Drain(pb.DrainRequest())
        await worker.stub.StandBy(pb.StandByRequest())
        assert (await worker.registered()).state == "draining"

        await worker.stub.Undrain(pb.UndrainRequest())
        await worker.until("standby")
        assert worker.refusing[-1] is True


async def test_a_worker_that_is_given_work_while_it_rests_is_no_longer_on_standby(
    redis_server: Any,
) -> None:
    async with working(redis_server) as worker:
        worker.idle = True
        await worker.stub.StandBy(pb.StandByRequest())
        await worker.until("standby")

        worker.idle = False
        await worker.until("draining")


async def test_services_without_work_of_that_kind_refuse(redis_server: Any) -> None:
    settings = ServiceSettings(redis_url=redis_server.url)
    scheduler = Identity("scheduler", "scheduler-0")
    async with (
        stop_event() as stop,
        service(settings, scheduler, lambda server: None, stop) as process,
        channel(process.admin.address) as connection,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.StandBy(pb.StandByRequest())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "this is the scheduler" in str(refused.value.details())
