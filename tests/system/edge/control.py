"""The control plane of a suite of edge agents, as it looks from outside."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from msgspec.structs import replace

from moesaic.cluster.placement_view import committed_epoch
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.placement import Placement
from moesaic.v1 import edge_agent_pb2, edge_agent_pb2_grpc
from tests.suites import Suite
from tests.system.asking import until
from tests.system.control import CALL_S, Control, control

SETTINGS = {  # a suite that is quick to report and to act, and moves nothing by itself
    "MOESAIC_ACTIVATION_WINDOW_S": "0.5",
    "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
    "MOESAIC_REPLAN_INTERVAL_S": "3600",
    "MOESAIC_LOAD_SHARE": "0.03",  # loading takes long enough to be met in its middle
}


class EdgeControl(Control):
    """Reads what agents hold and tell."""

    def __init__(self, suite: Suite, bus: Bus) -> None:
        super().__init__(suite, bus)
        names = [process["name"] for process in suite.state()["processes"]]
        self.workers = [name for name in names if name.startswith("agent-")]

    async def profile(self, agent: str) -> edge_agent_pb2.GetProfileResponse:
        """Ask an agent for its profile."""
        async with self.suite.channel(agent) as connection:
            stub = edge_agent_pb2_grpc.EdgeAgentServiceStub(connection)
            return await stub.GetProfile(edge_agent_pb2.GetProfileRequest(), timeout=CALL_S)

    async def limit(self, agent: str, limit_bytes: int) -> int:
        """Change the memory of an agent; give its slots."""
        async with self.suite.channel(agent) as connection:
            stub = edge_agent_pb2_grpc.EdgeAgentServiceStub(connection)
            request = edge_agent_pb2.SetMemoryLimitRequest(memory_bytes=limit_bytes)
            return int((await stub.SetMemoryLimit(request, timeout=CALL_S)).num_slots)

    async def complete(self) -> Placement:
        """Wait until all agents that there are now have one placement, which has every expert; give it."""
        while True:
            with suppress(PeerLost, grpc.aio.AioRpcError):
                while not await committed_epoch(self.bus):
                    await asyncio.sleep(0.1)
                epoch = await self.agreed()
                placement, members = await self.placement(), dict(await self.members())
                placed = {w.worker_id: w.generation for w in placement.workers}
                there = {name: members.get(name) for name in self.workers}
                if placement.epoch == epoch and placed == there:
                    assert lacking(placement) == []
                    return placement
            await asyncio.sleep(0.1)


@asynccontextmanager
async def edge_control(suite: Suite) -> AsyncIterator[EdgeControl]:
    """The control plane of this suite for the length of the block."""
    async with control(suite) as seen:
        yield EdgeControl(suite, seen.bus)


def lacking(placement: Placement) -> list[tuple[int, int]]:
    """List the layers and experts that nobody holds."""
    return [
        (layer, expert)
        for layer in placement.layers
        for expert, holders in enumerate(placement.holders(layer))
        if not holders
    ]


def swapped(placement: Placement, count: int, one: int, other: int) -> Placement:
    """Exchange ``count`` experts between two agents: each holds what only the other had."""
    slots = [[list(experts) for experts in layer] for layer in placement.slots]
    left = count
    for layer in slots:
        here = [expert for expert in layer[one] if expert not in layer[other]]
        there = [expert for expert in layer[other] if expert not in layer[one]]
        for mine, theirs in list(zip(here, there, strict=False))[:left]:
            layer[one][layer[one].index(mine)] = theirs
            layer[other][layer[other].index(theirs)] = mine
            left -= 1
    assert not left, "they have too few experts of their own"
    ordered = [[sorted(experts) for experts in layer] for layer in slots]
    return replace(placement, slots=ordered)


class Watch:
    """Log entries of a service from now on."""

    def __init__(self, suite: Suite, name: str) -> None:
        self._suite, self._name = suite, name
        self._before = len(suite.log(name))

    def entries(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Return the new ones of one kind."""
        new = self._suite.log(self._name)[self._before :]
        return [e for e in new if e["event"] == event and fields.items() <= e.items()]

    async def until(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait for the first one."""
        await until(lambda: self.entries(event, **fields))
        return self.entries(event, **fields)[0]


def restarts(suite: Suite, name: str) -> Callable[[], bool]:
    """Tell, from now on, whether a process was started anew."""
    before = suite.pid(name)
    return lambda: suite.pid(name) not in (0, before)
