"""ElasticOperator: the scheduler and the workers of a running suite, as an operator sees and orders them."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

import grpc

from benchmarks.common.suite import RunningSuite
from moesaic.cli.machine.state import RUN_DIRECTORY, ProcessState, StateFile
from moesaic.cluster.rpc.channels import channel
from moesaic.v1 import attention_pb2, attention_pb2_grpc, scheduler_pb2_grpc
from moesaic.v1 import scheduler_pb2 as pb

CALL_S, SAMPLE_S, POLL_S, ORDER_S = 10.0, 0.5, 0.1, 120.0


@dataclass(frozen=True)
class ElasticSample:
    """The state of the fleet at one time.

    Attributes:
        at_s: seconds from the start of the arm.
        attention: active attention workers.
        experts: active expert workers.
        prefill_threshold: the least of any active worker.
        decode_threshold: likewise.
        requests: requests in flight.
    """

    at_s: float
    attention: int
    experts: int
    prefill_threshold: float
    decode_threshold: float
    requests: int


@dataclass(frozen=True)
class ElasticOperator:
    """Calls; a scheduler that was killed is asked again once it is back."""

    suite: RunningSuite
    wall_clock: Callable[[], float] = time.time

    async def scale(self, shape: pb.FleetShape) -> None:
        """Want a shape, and wait until it is there.

        Raises:
            TimeoutError: it does not come.
        """
        async with asyncio.timeout(ORDER_S):
            async with self._scheduler() as stub:
                await stub.Scale(pb.ScaleRequest(shape=shape), timeout=CALL_S)
            await self._until_shape(shape)

    async def until_shape(self, shape: pb.FleetShape, most_s: float) -> None:
        """Wait until this number of workers is active, or until a time limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._until_shape(shape)

    async def scaling(self, policy: pb.ScalingPolicy) -> None:
        """Change the policy of scaling."""
        async with self._scheduler() as stub:
            await stub.SetScaling(pb.SetScalingRequest(policy=policy), timeout=CALL_S)

    async def brownout(self, policy: pb.BrownoutPolicy) -> None:
        """Change the policy of brownout, and wait until the active workers have it."""
        async with self._scheduler() as stub:
            await stub.SetBrownout(pb.SetBrownoutRequest(policy=policy), timeout=CALL_S)
        async with asyncio.timeout(ORDER_S):
            loads = await self._loads()
            while any(load.brownout.mode != policy.mode for load in loads):
                await asyncio.sleep(POLL_S)
                loads = await self._loads()

    async def decisions(self) -> list[pb.ScalingDecision]:
        """List the decisions about numbers of workers, oldest first."""
        return list(reversed((await self._told(limit=1000)).decisions))

    @asynccontextmanager
    async def sampling(
        self, now_s: Callable[[], float], into: list[ElasticSample]
    ) -> AsyncIterator[None]:
        """Look at the fleet every half second for the length of the block."""
        task = asyncio.create_task(self._sample(now_s, into))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def kill_in_action(self, known: set[str]) -> None:
        """Kill the scheduler as soon as the second new decision to add workers is in progress."""
        while True:
            new = [d for d in await self.decisions() if d.decision_id not in known and d.adopted]
            up = [d for d in new if _total(d.wanted) > _total(d.before)]
            if len(up) >= 2 and not up[-1].HasField("seconds") and not up[-1].failure:
                if pid := self._process("scheduler").pid:
                    os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(POLL_S)

    def activations(self, since: float) -> int:
        """Count the orders to work that any worker was given since a time of the wall clock."""
        log = (self.suite.directory / RUN_DIRECTORY / "scheduler.log").read_text(encoding="utf-8")
        count = 0
        for line in log.splitlines():
            with suppress(ValueError):
                entry = json.loads(line)
                is_one = entry.get("event") == "worker.told" and entry.get("to") == "work"
                count += is_one and _seconds_of(entry["ts"]) >= since
        return count

    async def _sample(self, now_s: Callable[[], float], into: list[ElasticSample]) -> None:
        while True:
            told, loads = await self._told(), await self._loads()
            into.append(
                ElasticSample(
                    now_s(),
                    told.shape.attention,
                    told.shape.experts,
                    min((load.brownout.prefill_threshold for load in loads), default=1.0),
                    min((load.brownout.decode_threshold for load in loads), default=1.0),
                    sum(load.num_running + load.num_waiting for load in loads),
                )
            )
            await asyncio.sleep(SAMPLE_S)

    async def _until_shape(self, shape: pb.FleetShape) -> None:
        told = await self._told()
        while told.shape != shape or (
            told.action.shape == shape and not told.action.HasField("seconds")
        ):
            await asyncio.sleep(POLL_S)
            told = await self._told()

    async def _told(self, limit: int = 1) -> pb.GetScalingResponse:
        while True:
            with suppress(grpc.aio.AioRpcError):
                async with self._scheduler() as stub:
                    request = pb.GetScalingRequest(limit=limit)
                    answer: pb.GetScalingResponse = await stub.GetScaling(request, timeout=CALL_S)
                    return answer
            await asyncio.sleep(POLL_S)

    async def _loads(self) -> list[attention_pb2.GetLoadResponse]:
        found = []
        for name in ("attention-0", "attention-1"):
            with suppress(grpc.aio.AioRpcError):
                async with channel(self._process(name).admin_address, name) as connection:
                    stub = attention_pb2_grpc.AttentionServiceStub(connection)
                    found.append(await stub.GetLoad(attention_pb2.GetLoadRequest(), timeout=CALL_S))
        return found

    @asynccontextmanager
    async def _scheduler(self) -> AsyncIterator["scheduler_pb2_grpc.SchedulerServiceAsyncStub"]:
        address = self._process("scheduler").admin_address
        async with channel(address, "scheduler") as connection:
            yield scheduler_pb2_grpc.SchedulerServiceStub(connection)

    def _process(self, name: str) -> ProcessState:
        state = StateFile(self.suite.directory / RUN_DIRECTORY).running()
        assert state is not None, "the suite has ended"
        return next(process for process in state.processes if process.name == name)


def _total(shape: pb.FleetShape) -> int:
    return shape.attention + shape.experts


def _seconds_of(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
