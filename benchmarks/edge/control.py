"""The control plane of a suite of edge servers: plans, placements in force, counts, and brownout."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.common.suite import RunningSuite
from benchmarks.edge.counts import CountsSample, SiteCounts, messages_of
from moesaic.cluster.placements import decode_placement, encode_placement
from moesaic.cluster.rpc.channels import channel
from moesaic.messages.placement import Placement
from moesaic.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    attention_pb2,
    attention_pb2_grpc,
    edge_agent_pb2,
    edge_agent_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

if TYPE_CHECKING:  # names for type checkers
    from moesaic.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from moesaic.v1.attention_pb2_grpc import AttentionServiceAsyncStub
    from moesaic.v1.edge_agent_pb2_grpc import EdgeAgentServiceAsyncStub
    from moesaic.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

PLAN_S, CHANGE_S, POLL_S, SAMPLE_S = 60.0, 180.0, 0.25, 1.0
TOLD_S = 0.5  # until the scheduler has read a change of a worker's record
DECISIONS = 100


class NoPlan(Exception):
    """The scheduler has seen too little, or something that it waits for the end of."""


@dataclass(frozen=True)
class EdgeServer:
    """Stubs of one agent."""

    edge: "EdgeAgentServiceAsyncStub"
    admin: "AdminServiceAsyncStub"
    attention: "AttentionServiceAsyncStub"

    async def counts(self) -> SiteCounts:
        """Ask for its counts since it started."""
        told = await self.edge.GetProfile(edge_agent_pb2.GetProfileRequest())
        stats = await self.admin.GetStats(admin_pb2.GetStatsRequest())
        return SiteCounts(
            local=told.local,
            cached=told.cached,
            loaded=told.loaded,
            remote=told.remote,
            messages=messages_of(stats.values),
            away_s=told.away_s,
            layers_s=told.layers_s,
        )

    async def thresholds(self) -> set[float]:
        """Ask for the thresholds of prompts and of answers."""
        told = (await self.attention.GetLoad(attention_pb2.GetLoadRequest())).brownout
        return {told.prefill_threshold, told.decode_threshold}

    async def holds(self, epoch: int, num_experts: int) -> bool:
        """Return true if an epoch is in force and experts of earlier ones have gone."""
        info = await self.admin.GetInfo(admin_pb2.GetInfoRequest())
        told = await self.edge.GetProfile(edge_agent_pb2.GetProfileRequest())
        return info.epoch == epoch and told.num_held == num_experts


@dataclass(frozen=True)
class EdgeControl:
    """The scheduler and the agents."""

    scheduler: "SchedulerServiceAsyncStub"
    servers: tuple[EdgeServer, ...]

    async def counts(self) -> tuple[SiteCounts, ...]:
        """Ask all servers for their counts since they started."""
        return tuple(await asyncio.gather(*(server.counts() for server in self.servers)))

    async def sample(self, into: list[CountsSample], started: float) -> None:
        """Note the counts every second, until cancelled; times count from ``started``."""
        while True:
            counts = await self.counts()
            into.append(CountsSample(time.perf_counter() - started, counts))
            await asyncio.sleep(SAMPLE_S)

    async def slots(self) -> list[int]:
        """Ask for the experts that each server has room for."""
        request = edge_agent_pb2.GetProfileRequest()
        return [(await server.edge.GetProfile(request)).num_slots for server in self.servers]

    async def placement(self) -> Placement:
        """Ask for the placement in force; wait for the first one."""
        request = scheduler_pb2.WatchPlacementRequest()
        watching = self.scheduler.WatchPlacement(request, timeout=CHANGE_S)
        try:
            async for told in watching:
                return decode_placement(told.placement)
        finally:
            watching.cancel()
        raise RuntimeError("the scheduler tells of no placement")

    async def plan(self, policy: str) -> Placement:
        """Have the scheduler plan by a policy for the traffic that it has seen.

        Raises:
            NoPlan: there is none; the text says why.
        """
        request = scheduler_pb2.PlanRequest(policy=policy)
        made = (await self.scheduler.Plan(request, timeout=PLAN_S)).plan
        if not made.HasField("seconds"):
            raise NoPlan(f"{policy}: {made.reason}")
        # It has none yet, but documents have.
        made.placement.epoch = 1
        return decode_placement(made.placement)

    async def apply(self, wanted: Placement) -> float:
        """Make a placement the one in force, and wait until nothing else is held.

        Servers have no limit of memory meanwhile. With it, experts would come in ten stages, some seconds apart.

        Returns:
            Seconds that it took.

        Raises:
            TimeoutError: it does not come into force in minutes.
        """
        started = time.perf_counter()
        request = edge_agent_pb2.GetProfileRequest()
        told = [await server.edge.GetProfile(request) for server in self.servers]
        async with asyncio.timeout(CHANGE_S):
            await self._limit([0] * len(told))
            await self.scheduler.ApplyPlacement(
                scheduler_pb2.ApplyPlacementRequest(
                    placement=encode_placement(wanted), base_epoch=(await self.placement()).epoch
                )
            )
            await self.settled()
            await self._limit([each.memory_limit_bytes for each in told])
        return time.perf_counter() - started

    async def _limit(self, memory_bytes: Sequence[int]) -> None:
        """Limit the memory of each server, and wait until the scheduler knows."""
        for server, limit in zip(self.servers, memory_bytes, strict=True):
            await server.edge.SetMemoryLimit(
                edge_agent_pb2.SetMemoryLimitRequest(memory_bytes=limit)
            )
        await asyncio.sleep(TOLD_S)

    async def settled(self) -> None:
        """Wait until every server holds what the placement in force says, and nothing else."""
        while True:
            placed = await self.placement()
            held = [
                sum(expert >= 0 for layer in placed.slots for expert in layer[site])
                for site in range(len(self.servers))
            ]
            holding = (
                server.holds(placed.epoch, num)
                for server, num in zip(self.servers, held, strict=True)
            )
            if all(await asyncio.gather(*holding)):
                return
            await asyncio.sleep(POLL_S)

    async def set_policy(self, policy: str) -> None:
        """Set what experts are moved by from now on."""
        request = scheduler_pb2.SchedulerServiceSetPolicyRequest(policy=policy)
        await self.scheduler.SetPolicy(request)

    async def migrations(self, since: float) -> list[scheduler_pb2.Decision]:
        """List the decisions by traffic, adopted since a time of day, that placed something; oldest first."""
        request = scheduler_pb2.GetDecisionsRequest(limit=DECISIONS)
        found = (await self.scheduler.GetDecisions(request)).decisions
        return [
            each
            for each in reversed(found)
            if each.cause == "traffic" and each.adopted and each.at >= since
        ]

    async def degrade(self, threshold: float) -> None:
        """Set both thresholds, with degraded choices dropped; wait until all servers follow.

        Raises:
            TimeoutError: one does not.
        """
        policy = scheduler_pb2.BrownoutPolicy(
            mode="manual", way=0, prefill_threshold=threshold, decode_threshold=threshold
        )
        await self.scheduler.SetBrownout(scheduler_pb2.SetBrownoutRequest(policy=policy))
        async with asyncio.timeout(CHANGE_S):
            while True:
                told = [await server.thresholds() for server in self.servers]
                if told == [{threshold}] * len(told):
                    return
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def edge_control(suite: RunningSuite, num_sites: int) -> AsyncIterator[EdgeControl]:
    """Connect to the scheduler and to the agents."""
    async with AsyncExitStack() as stack:
        names = ["scheduler", *(f"agent-{site}" for site in range(num_sites))]
        to_scheduler, *to_agents = [
            await stack.enter_async_context(channel(suite.processes[name]["admin_address"], name))
            for name in names
        ]
        servers = tuple(
            EdgeServer(
                edge_agent_pb2_grpc.EdgeAgentServiceStub(to_agent),
                admin_pb2_grpc.AdminServiceStub(to_agent),
                attention_pb2_grpc.AttentionServiceStub(to_agent),
            )
            for to_agent in to_agents
        )
        yield EdgeControl(scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler), servers)
