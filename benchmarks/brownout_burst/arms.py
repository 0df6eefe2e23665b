"""The arms: policies of brownout that a suite is given one after the other, and its thresholds meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.brownout_burst.figures import BurstSample, BurstTargets
from benchmarks.brownout_burst.point import BurstPoint
from benchmarks.common.suite import RunningSuite
from moesaic.cluster.rpc.channels import channel
from moesaic.v1 import attention_pb2, attention_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:  # names for type checkers
    from moesaic.v1.attention_pb2_grpc import AttentionServiceAsyncStub
    from moesaic.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

ARMS = ("none", "paper", "ours")
CHANGE_S, POLL_S, SAMPLE_S = 60.0, 0.1, 0.5
OFF = scheduler_pb2.BrownoutPolicy(mode="off")


def policy_of(arm: str, point: BurstPoint, targets: BurstTargets) -> scheduler_pb2.BrownoutPolicy:
    """Make the policy of an arm: no brownout, algorithm 2 of the paper alone, or queue, degrade, shed."""
    if arm == "none":
        return OFF
    return scheduler_pb2.BrownoutPolicy(
        mode="paper" if arm == "paper" else "auto",
        way=point.way,
        slo_ttft_s=targets.ttft_s,
        slo_tpot_s=targets.tpot_s,
    )


def manual(point: BurstPoint, threshold: float) -> scheduler_pb2.BrownoutPolicy:
    """Make a policy that keeps both thresholds."""
    return scheduler_pb2.BrownoutPolicy(
        mode="manual", way=point.way, prefill_threshold=threshold, decode_threshold=threshold
    )


@dataclass(frozen=True)
class BurstControl:
    """The control plane of a suite with one attention worker."""

    scheduler: "SchedulerServiceAsyncStub"
    worker: "AttentionServiceAsyncStub"

    async def load(self) -> attention_pb2.GetLoadResponse:
        """Ask the worker for its state."""
        return await self.worker.GetLoad(attention_pb2.GetLoadRequest())

    async def set(self, policy: scheduler_pb2.BrownoutPolicy) -> None:
        """Set a policy, and wait until the worker has it.

        Raises:
            TimeoutError: it does not take it within a minute.
        """
        await self.scheduler.SetBrownout(scheduler_pb2.SetBrownoutRequest(policy=policy))
        async with asyncio.timeout(CHANGE_S):
            state = await self.load()
            while not _follows(state.brownout, policy):
                await asyncio.sleep(POLL_S)
                state = await self.load()

    async def sample(self, now_s: Callable[[], float], into: list[BurstSample]) -> None:
        """Look at thresholds every half second, until cancelled."""
        while True:
            load = await self.load()
            told = load.brownout
            into.append(
                BurstSample(
                    now_s(),
                    told.prefill_threshold,
                    told.decode_threshold,
                    told.shedding,
                    load.num_running + load.num_waiting,
                    told.ttft_p90_s if told.HasField("ttft_p90_s") else None,
                    told.tpot_p90_s if told.HasField("tpot_p90_s") else None,
                )
            )
            await asyncio.sleep(SAMPLE_S)

    async def settled(self, samples: list[BurstSample], most_s: float) -> None:
        """Wait until the worker is idle and exact again, or for so long."""
        ends = asyncio.get_running_loop().time() + most_s
        while asyncio.get_running_loop().time() < ends:
            if samples and samples[-1].is_exact and not samples[-1].requests:
                return
            await asyncio.sleep(SAMPLE_S)


def _follows(told: attention_pb2.BrownoutLoad, policy: scheduler_pb2.BrownoutPolicy) -> bool:
    """The worker has the policy, and its united experts if thresholds are to be less than 1."""
    if told.mode != policy.mode:
        return False
    return policy.mode != "manual" or told.decode_threshold == policy.decode_threshold


@asynccontextmanager
async def burst_control(suite: RunningSuite) -> AsyncIterator[BurstControl]:
    """Connect to the scheduler and the attention worker."""
    scheduler = suite.processes["scheduler"]["admin_address"]
    async with (
        channel(scheduler, "scheduler") as to_scheduler,
        channel(suite.attention_address, "attention-0") as to_worker,
    ):
        yield BurstControl(
            scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler),
            attention_pb2_grpc.AttentionServiceStub(to_worker),
        )
