"""A suite with workers on standby, as operators and the registry see it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from moesaic.v1 import scheduler_pb2 as pb
from moesaic.v1 import scheduler_pb2_grpc
from tests.suites import Suite
from tests.system.control import events
from tests.waiting import HANG_S, until

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

        async def scaled() -> tuple[str] | None:
            try:
                async with self.stub() as stub:
                    answer = await stub.Scale(pb.ScaleRequest(shape=shape), timeout=HANG_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                return None
            return (str(answer.decision_id),)

        [decision_id] = await until(scaled)
        return decision_id

    async def scaling(self) -> pb.GetScalingResponse:
        """What the scheduler tells of scaling."""

        async def told() -> pb.GetScalingResponse | None:
            with suppress(grpc.aio.AioRpcError):
                async with self.stub() as stub:
                    return await stub.GetScaling(pb.GetScalingRequest(), timeout=HANG_S)
            return None

        return await until(told)

    async def set(self, **changes: Any) -> None:
        """Change the policy."""
        async with self.stub() as stub:
            policy = pb.ScalingPolicy(**changes)
            await stub.SetScaling(pb.SetScalingRequest(policy=policy), timeout=HANG_S)

    async def ended(self, decision_id: str) -> pb.ScalingDecision:
        """Wait until a decision has its result."""

        async def result() -> pb.ScalingDecision | None:
            for decision in (await self.scaling()).decisions:
                is_it = decision.decision_id == decision_id
                if is_it and (decision.HasField("seconds") or decision.failure):
                    return decision
            return None

        return await until(result)

    async def scaled_to(self, shape: pb.FleetShape) -> pb.ScalingDecision:
        """Want a shape and wait for it; nothing to do if it is there."""
        decision_id = await self.want(shape)
        if decision_id:
            decision = await self.ended(decision_id)
        else:
            decision = pb.ScalingDecision()
            await self.until_shape(shape)
        num_resting = len(WORKERS) - shape.attention - shape.experts
        if not decision.failure:
            await until(lambda: len(self.resting()) == num_resting)  # and have said so
        return decision

    async def until_shape(self, shape: pb.FleetShape) -> None:
        """Wait until so many workers are active."""

        async def is_there() -> bool:
            return (await self.scaling()).shape == shape

        await until(is_there)

    def states(self, name: str) -> list[str]:
        """The states that a worker has been in, one after the other."""
        return [entry["state"] for entry in events(self.suite, name, "service.state")]

    def resting(self) -> list[str]:
        """Return the roles of the workers that are on standby."""
        names = (name for name in WORKERS if self.states(name)[-1] == "standby")
        return sorted(name.split("-")[0] for name in names)

    async def advice(self) -> pb.ScalingDecision | None:
        """The newest decision, if it was not carried out."""
        decisions = (await self.scaling()).decisions
        return None if not decisions or decisions[0].adopted else decisions[0]

    async def until_activated(self, count: int) -> None:
        """Wait until workers were told to work so often."""
        await until(lambda: self.activations() >= count)

    def activations(self) -> int:
        """How often any worker was told to work, by all schedulers that there were."""
        told = events(self.suite, "scheduler", "worker.told")
        return sum(entry["to"] == "work" for entry in told)
