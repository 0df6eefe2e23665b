"""A suite with workers on standby, as operators and the registry see it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from moesaic.v1 import scheduler_pb2 as pb
from moesaic.v1 import scheduler_pb2_grpc
from tests.suites import Suite
from tests.system.control import events

SETTINGS = {  # workers are placed, and load, as soon as they come
    "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
    "MOESAIC_SETTLE_S": "0.2",
    "MOESAIC_LOAD_SHARE": "1",
}
FLAGS = (
    *("--attention", "1", "--experts", "2", "--standby-attention", "1", "--standby-experts", "1"),
    *("--slots-per-layer", "32"),
)
WORKERS = ("attention-0", "attention-1", "expert-0", "expert-1", "expert-2")
LARGE, SMALL = pb.FleetShape(attention=2, experts=3), pb.FleetShape(attention=1, experts=2)


class Fleet:
    """Calls of an operator."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        """The scheduler, wherever it listens now."""
        async with self.suite.channel("scheduler") as connection:
            yield scheduler_pb2_grpc.SchedulerServiceStub(connection)

    async def want(self, shape: pb.FleetShape) -> str:
        """Scale, and return the decision's id; a scheduler that has just been killed comes back first."""
        while True:
            try:
                async with self.stub() as stub:
                    answer = await stub.Scale(pb.ScaleRequest(shape=shape), timeout=5)
                return str(answer.decision_id)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                await asyncio.sleep(0.2)

    async def scaling(self) -> pb.GetScalingResponse:
        """What the scheduler tells of scaling."""
        while True:
            try:
                async with self.stub() as stub:
                    return await stub.GetScaling(pb.GetScalingRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.2)

    async def set(self, **changes: Any) -> None:
        """Change the policy."""
        async with self.stub() as stub:
            policy = pb.ScalingPolicy(**changes)
            await stub.SetScaling(pb.SetScalingRequest(policy=policy), timeout=5)

    async def ended(self, decision_id: str) -> pb.ScalingDecision:
        """Wait until a decision has its result."""
        while True:
            for decision in (await self.scaling()).decisions:
                is_it = decision.decision_id == decision_id
                if is_it and (decision.HasField("seconds") or decision.failure):
                    return decision
            await asyncio.sleep(0.2)

    async def scaled_to(self, shape: pb.FleetShape) -> pb.ScalingDecision:
        """Want a shape and wait for it; nothing to do if it is there."""
        decision_id = await self.want(shape)
        if not decision_id:
            await self.until_shape(shape)
            return pb.ScalingDecision()
        return await self.ended(decision_id)

    async def until_shape(self, shape: pb.FleetShape) -> None:
        """Wait until so many workers are active."""
        while (await self.scaling()).shape != shape:
            await asyncio.sleep(0.2)

    def states(self, name: str) -> list[str]:
        """The states that a worker has been in, one after the other."""
        return [entry["state"] for entry in events(self.suite, name, "service.state")]

    async def advice(self) -> pb.ScalingDecision | None:
        """The newest decision, if it was not carried out."""
        decisions = (await self.scaling()).decisions
        return None if not decisions or decisions[0].adopted else decisions[0]

    async def until_activated(self, count: int) -> None:
        """Wait until workers were told to work so often."""
        while self.activations() < count:
            await asyncio.sleep(0.001)

    def activations(self) -> int:
        """How often any worker was told to work, by all schedulers that there were."""
        told = events(self.suite, "scheduler", "worker.told")
        return sum(entry["to"] == "work" for entry in told)
