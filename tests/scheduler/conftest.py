"""A real Redis, scheduler processes, and expert workers that only keep what they are told."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.cluster.placements import decode_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import Lease, next_generation, registered
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.rpc.server import admin_server
from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.errors import MoesaicError, NotReady, PeerLost, StaleEpoch
from moesaic.messages.placement import Placement
from moesaic.messages.registry import Role, WorkerRecord
from moesaic.settings import ServiceSettings
from moesaic.v1 import expert_pb2 as pb
from moesaic.v1 import expert_pb2_grpc, scheduler_pb2_grpc
from tests.redis_servers import RedisServer, RedisServers

NUM_EXPERTS, LAYERS = 8, [1, 2]


class ExpertWorker(expert_pb2_grpc.ExpertServiceServicer):
    """Keeps placements as a real one does, without weights."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id, self.generation = worker_id, 0
        self.lease: Lease
        self.prepared: dict[int, Placement] = {}
        self.epoch = 0
        self.aborted: list[int] = []
        self.confirmed: list[int] = []
        self.fail_with: MoesaicError | None = None
        self.united_fail_with: MoesaicError | None = None
        self.hangs_on: set[int] = set()  # epochs
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.asked_to_prepare = asyncio.Event()
        self.load_shares: dict[int, float] = {}  # by epoch
        self.committed = asyncio.Condition()

    async def PreparePlacement(self, request, context):
        async with errors_as_status(context):
            self.asked_to_prepare.set()
            await self.may_prepare.wait()
            placement = decode_placement(request.placement)
            self.load_shares.setdefault(placement.epoch, request.load_share)
            known = self.prepared.get(placement.epoch) == placement
            failure = self.fail_with or (self.united_fail_with if placement.num_united else None)
            if failure is not None and not known:
                raise failure
            if placement.epoch in self.hangs_on:
                await asyncio.Event().wait()
            if placement.epoch < self.epoch:
                raise StaleEpoch(placement.epoch, self.epoch)
            self.prepared[placement.epoch] = placement
            return pb.PreparePlacementResponse(loaded=1)

    async def CommitPlacement(self, request, context):
        async with errors_as_status(context):
            if request.epoch < self.epoch:
                raise StaleEpoch(request.epoch, self.epoch)
            if request.epoch not in self.prepared:
                raise NotReady("not prepared")
            self.confirmed.append(request.epoch)
            async with self.committed:
                self.epoch = request.epoch
                self.committed.notify_all()
            return pb.CommitPlacementResponse(epoch=self.epoch)

    async def AbortPlacement(self, request, context):
        self.aborted.append(request.epoch)
        self.prepared.pop(request.epoch, None)
        return pb.AbortPlacementResponse()

    async def ListSlots(self, request, context):
        return pb.ListSlotsResponse(epoch=self.epoch)

    async def until_epoch(self, epoch: int) -> Placement:
        async with self.committed:
            await self.committed.wait_for(lambda: self.epoch >= epoch)
        return self.prepared[self.epoch]


class Suite:
    """One Redis with what runs on it."""

    def __init__(self, redis: RedisServer, parts: AsyncExitStack) -> None:
        self.redis, self._parts = redis, parts
        self.bus: Bus
        self.view: PlacementView

    async def restart_redis(self) -> None:
        """Start a Redis that was killed; returns once the bus reaches it."""
        self.redis.start()
        while True:
            with suppress(PeerLost):
                await self.bus.get_bytes("anything")
                return
            await asyncio.sleep(0.02)

    async def until_epoch(self, epoch: int) -> Placement:
        while self.view.epoch < epoch:
            await self.view.changed()
        assert self.view.current is not None
        return self.view.current

    @asynccontextmanager
    async def expert(
        self,
        worker_id: str,
        slots: int = 4,
        digest: str = "model-a",
        epoch: int = 0,
        fail_with: MoesaicError | None = None,
        role: Role = "expert",
        **fields: object,
    ) -> AsyncIterator[ExpertWorker]:
        worker = ExpertWorker(worker_id)
        worker.epoch, worker.fail_with = epoch, fail_with
        worker.generation = await next_generation(self.bus, worker_id)
        async with admin_server(
            ServiceSettings(),
            role,
            worker_id=worker_id,
            generation=worker.generation,
            register=lambda server: expert_pb2_grpc.add_ExpertServiceServicer_to_server(
                worker, server
            ),
        ) as admin:
            admin.status.epoch = epoch
            record = WorkerRecord(
                worker_id=worker_id,
                generation=worker.generation,
                role=role,
                state="ready",
                admin_address=admin.address,
                data_address=f"{worker_id}:1",
                model_digest=digest,
                slots_per_layer=slots,
                num_experts=NUM_EXPERTS,
                layers=LAYERS,
                **fields,  # type: ignore[arg-type]
            )
            async with registered(self.bus, record) as worker.lease:
                yield worker

    async def scheduler(self, *flags: str, worker_id: str = "scheduler-0") -> "Scheduler":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moesaic.services.scheduler", "--redis-url", self.redis.url),
            *("--worker-id", worker_id, "--settle-s", "0.05", "--cluster", "test"),
            *("--min-epoch-interval-s", "0", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        scheduler = Scheduler(process)
        self._parts.push_async_callback(scheduler.kill)
        return scheduler


class Scheduler:
    """A scheduler's process and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict] = []

    async def until(self, event: str, **fields: object) -> dict:
        """The first such event, whether it was logged already or is still to come."""
        wanted = {"event": event, **fields}

        def is_it(entry: dict) -> bool:
            return {name: entry.get(name) for name in wanted} == wanted

        for entry in filter(is_it, self.log):
            return entry
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.log.append(json.loads(line))
            if is_it(self.log[-1]):
                return self.log[-1]
        raise AssertionError(f"the scheduler ended before {event}: {self.log}")

    @asynccontextmanager
    async def stub(self):
        ready = await self.until("service.ready")
        async with channel(ready["admin_address"]) as connection:
            yield scheduler_pb2_grpc.SchedulerServiceStub(connection)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@asynccontextmanager
async def control_plane(redis_servers: RedisServers) -> AsyncIterator[Suite]:
    with redis_servers.lent() as redis:
        async with AsyncExitStack() as parts:
            suite = Suite(redis, parts)
            suite.bus = await parts.enter_async_context(Bus.connect(redis.url, "test"))
            suite.view = await parts.enter_async_context(watch_placement(suite.bus))
            yield suite


@pytest.fixture
async def control(redis_servers: RedisServers) -> AsyncIterator[Suite]:
    """A Redis that nothing runs on yet: for tests that start no scheduler of its own process."""
    async with control_plane(redis_servers) as suite:
        yield suite


@pytest.fixture
async def suite(control: Suite) -> Suite:
    """The same; tests that use it start schedulers."""
    return control
