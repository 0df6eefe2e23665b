"""The control plane of a suite of edge agents, as it looks from outside."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import msgspec
from msgspec.structs import replace

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import lease_key
from moesaic.errors import PeerLost
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import (
    edge_agent_pb2,
    edge_agent_pb2_grpc,
    expert_pb2,
    expert_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tests.suites import Suite
from tests.system.control import SETTINGS as USUAL
from tests.system.control import Control, control
from tests.waiting import HANG_S, until

SETTINGS = {  # a suite that is quick to report and to act, and moves nothing by itself
    **USUAL,
    "MOESAIC_CLOCK_SKEW_S": "3700",
    "MOESAIC_LOAD_SHARE": "0.05",  # loading takes long enough to be met in its middle
}
_records = msgspec.msgpack.Decoder(WorkerRecord)


class EdgeControl(Control):
    """Reads what agents hold and tell.

    Attributes:
        late: addresses of agents that were started beside the suite.
    """

    def __init__(self, suite: Suite, bus: Bus) -> None:
        super().__init__(suite, bus)
        names = [process["name"] for process in suite.state()["processes"]]
        self.workers = [name for name in names if name.startswith("agent-")]
        self.late: dict[str, str] = {}

    async def count_in(self, agent: str) -> None:
        """Count in an agent that was started beside the suite."""
        self.late[agent] = (await self._record(agent)).admin_address
        self.workers.append(agent)

    def count_out(self, agent: str) -> None:
        """Count it in no more."""
        del self.late[agent]
        self.workers.remove(agent)

    def channel(self, agent: str) -> grpc.aio.Channel:
        """Open a channel to an agent."""
        return self.suite.channel_to(self.late.get(agent) or self.suite.admin_address(agent))

    async def slots(self, name: str) -> expert_pb2.ListSlotsResponse:
        """Return the epoch and the experts that an agent has in force."""
        async with self.channel(name) as connection:
            stub = expert_pb2_grpc.ExpertServiceStub(connection)
            return await stub.ListSlots(expert_pb2.ListSlotsRequest(), timeout=HANG_S)

    async def follow_policy(self, policy: str) -> None:
        """Have experts placed by a policy."""
        async with self.suite.channel("scheduler") as connection:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(connection)
            request = scheduler_pb2.SchedulerServiceSetPolicyRequest(policy=policy)
            await stub.SetPolicy(request, timeout=HANG_S)

    async def profile(self, agent: str) -> edge_agent_pb2.GetProfileResponse:
        """Ask an agent for its profile."""
        async with self.channel(agent) as connection:
            stub = edge_agent_pb2_grpc.EdgeAgentServiceStub(connection)
            return await stub.GetProfile(edge_agent_pb2.GetProfileRequest(), timeout=HANG_S)

    async def most_expert_bytes(self, agent: str) -> int:
        """Return the memory for experts that an agent has told its cluster."""
        return (await self._record(agent)).max_expert_bytes

    async def _record(self, agent: str) -> WorkerRecord:
        record = await self.bus.get(lease_key(agent), _records)
        assert record is not None
        return record

    async def limit(self, agent: str, limit_bytes: int) -> int:
        """Change the memory of an agent; give its slots."""
        async with self.channel(agent) as connection:
            stub = edge_agent_pb2_grpc.EdgeAgentServiceStub(connection)
            request = edge_agent_pb2.SetMemoryLimitRequest(memory_bytes=limit_bytes)
            return int((await stub.SetMemoryLimit(request, timeout=HANG_S)).num_slots)

    async def complete(self) -> Placement:
        """Wait until all agents that there are now have one placement, which has every expert; give it."""

        async def complete() -> Placement | None:
            with suppress(PeerLost, grpc.aio.AioRpcError):
                epoch = await self.agreed()
                placement, members = await self.placement(), dict(await self.members())
                placed = {w.worker_id: w.generation for w in placement.workers}
                there = {name: members.get(name) for name in self.workers}
                if (placement.epoch, placed) == (epoch, there) and not lacking(placement):
                    return placement
            return None

        return await until(complete)


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


def with_sole_holder(placement: Placement, owner: str, count: int) -> Placement:
    """Give ``owner`` the only copies of ``count`` experts, and others the rest; all hold as many as before."""
    names = [worker.worker_id for worker in placement.workers]
    held = [sum(len(layer[n]) for layer in placement.slots) for n in range(len(names))]
    every = [(at, e) for at in range(len(placement.layers)) for e in range(placement.num_own)]
    sole, rest = every[:count], every[count:]
    slots: list[list[list[int]]] = [[[] for _ in names] for _ in placement.layers]
    for n, name in enumerate(names):
        mine = rest[: held[n]] if n % 2 else rest[-held[n] :]
        for at, expert in [*sole, *mine[: held[n] - count]] if name == owner else mine:
            slots[at][n].append(expert)
    return replace(placement, slots=slots)


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


def restarts(suite: Suite, name: str) -> Callable[[], bool]:
    """Tell, from now on, whether a process was started anew."""
    before = suite.pid(name)
    return lambda: suite.pid(name) not in (0, before)
