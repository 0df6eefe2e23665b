"""The control plane of a running suite as it looks from outside: Redis, workers, schedulers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
from msgspec.structs import replace

from moesaic.cluster.placement_view import committed_epoch, document
from moesaic.cluster.placements import encode_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import admin_pb2, admin_pb2_grpc, expert_pb2, expert_pb2_grpc, scheduler_pb2_grpc
from moesaic.v1 import scheduler_pb2 as pb
from tests.suites import Suite, log_entries
from tests.waiting import HANG_S, POLL_S, until

CALLS_BREAK_S = 5.0  # those of a scheduler that hangs for longer
SETTINGS = {  # a suite that is quick to report and to act, and does nothing by itself
    "MOESAIC_ACTIVATION_WINDOW_S": "0.5",
    "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
    "MOESAIC_REPLAN_INTERVAL_S": "3600",
    "MOESAIC_LOAD_SHARE": "0.1",  # loading takes long enough to be met in its middle
}
_placements = msgspec.msgpack.Decoder(Placement)
_records = msgspec.msgpack.Decoder(WorkerRecord)


def events(suite: Suite, name: str, event: str) -> list[dict[str, Any]]:
    """Return a service's log entries of one kind."""
    return [entry for entry in suite.log(name) if entry["event"] == event]


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
        return (await until(lambda: self.entries(event, **fields)))[0]


@contextmanager
def paused(suite: Suite, name: str) -> Iterator[None]:
    """Stop one process for the length of the block; it may be killed meanwhile."""
    pid = suite.pid(name)
    assert pid, f"{name} does not run"  # nobody else may be stopped
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def rotated(placement: Placement, num_layers: int) -> Placement:
    """Return the placement with the experts of the first layers moved on by one worker."""
    slots = [
        [*layer[1:], layer[0]] if idx < num_layers else layer
        for idx, layer in enumerate(placement.slots)
    ]
    return replace(placement, slots=slots)


class Control:
    """Reads what processes hold, and asks schedulers for placements."""

    def __init__(self, suite: Suite, bus: Bus) -> None:
        self.suite, self.bus = suite, bus
        names = [process["name"] for process in suite.state()["processes"]]
        self.workers = [name for name in names if name.startswith("expert-")]

    def _scheduler(self, address: str = "") -> grpc.aio.Channel:
        return self.suite.channel_to(address or self.suite.admin_address("scheduler"))

    async def placement(self) -> Placement:
        """Return the placement that Redis has."""

        async def committed() -> Placement | None:  # none: that epoch has just ended
            return await self.bus.get(document(await committed_epoch(self.bus)), _placements)

        return await until(committed)

    async def slots(self, name: str) -> expert_pb2.ListSlotsResponse:
        """Return the epoch and the experts that an expert worker has in force."""
        async with self.suite.channel(name) as connection:
            stub = expert_pb2_grpc.ExpertServiceStub(connection)
            return await stub.ListSlots(expert_pb2.ListSlotsRequest(), timeout=HANG_S)

    async def agreed(self) -> int:
        """Wait until Redis, the gateway and all expert workers have one epoch; give it."""
        return await self._everywhere(alone=False)

    async def settled(self) -> int:
        """Wait until they agree, and nobody keeps experts for another placement; give the epoch."""
        return await self._everywhere(alone=True)

    async def _everywhere(self, *, alone: bool) -> int:
        async def agreed() -> int | None:
            with suppress(PeerLost, grpc.aio.AioRpcError):  # they are not back yet
                placement = await self.placement()
                if await self._is_everywhere(placement):
                    return placement.epoch if not alone or await self.is_alone(placement) else None
            return None

        return await until(agreed)

    async def _is_everywhere(self, placement: Placement) -> bool:
        if [worker.worker_id for worker in placement.workers] != self.workers:
            return False
        async with self.suite.channel("gateway") as connection:
            stub = admin_pb2_grpc.AdminServiceStub(connection)
            info = await stub.GetInfo(admin_pb2.GetInfoRequest(), timeout=HANG_S)
        held = [await self.slots(name) for name in self.workers]
        if {info.epoch, *(answer.epoch for answer in held)} != {placement.epoch}:
            return False
        for idx, answer in enumerate(held):
            wanted = [(layer, placement.slots[i][idx]) for i, layer in enumerate(placement.layers)]
            there = [(slot.layer, slot.expert_id) for slot in answer.slots]
            assert sorted(there) == sorted((layer, e) for layer, es in wanted for e in es)
        return True

    async def is_alone(self, placement: Placement) -> bool:
        """Check whether workers hold the experts of this placement and no others."""
        held = [(await self.slots(name)).resident_bytes for name in self.workers]
        return held == await self.bytes_of(placement)

    async def bytes_of(self, *placements: Placement) -> list[int]:
        """Bytes of what each worker holds for these together, every expert once."""
        record = await self.bus.get(f"worker:{self.workers[0]}", _records)
        if record is None:  # Redis has only just come back
            return []
        distinct = [
            {
                (layer, expert)
                for placement in placements
                for layer, slots in enumerate(placement.slots)
                for expert in slots[idx]
                if expert != EMPTY_SLOT
            }
            for idx in range(len(self.workers))
        ]
        return [len(experts) * record.expert_bytes for experts in distinct]

    async def pulled(self) -> list[float]:
        """Experts that each worker has had from others since it was started."""
        counts = []
        for name in self.workers:
            async with self.suite.channel(name) as connection:
                stub = admin_pb2_grpc.AdminServiceStub(connection)
                stats = await stub.GetStats(admin_pb2.GetStatsRequest(), timeout=HANG_S)
            pulls = [v for k, v in stats.values.items() if k.startswith("moesaic_expert_pulls_")]
            counts.append(sum(pulls))
        return counts

    async def apply(self, placement: Placement, scheduler: str = "") -> int:
        """Have a scheduler make this the placement, and give its epoch."""
        async with self._scheduler(scheduler) as connection:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(connection)
            request = pb.ApplyPlacementRequest(
                placement=encode_placement(placement), base_epoch=placement.epoch
            )
            return int((await stub.ApplyPlacement(request, timeout=HANG_S)).epoch)

    async def fleet(self, scheduler: str = "") -> pb.GetFleetResponse:
        """Return the fleet as a scheduler sees it."""
        async with self._scheduler(scheduler) as connection:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(connection)
            return await stub.GetFleet(pb.GetFleetRequest(), timeout=HANG_S)

    async def members(self) -> list[tuple[str, int]]:
        """List the registered workers, each with its generation."""
        workers = (await self.fleet()).workers
        return [(worker.worker_id, worker.generation) for worker in workers]

    async def windows(self) -> int:
        """Reports of expert workers that the scheduler has taken in since it was started."""
        async with self._scheduler() as connection:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(connection)
            request = pb.SchedulerServiceGetActivationsRequest()
            return int((await stub.GetActivations(request, timeout=HANG_S)).windows)

    async def until_reported(self, windows: int) -> None:
        """Wait until the scheduler has taken in more reports than so many."""

        async def more() -> bool:
            return await self.windows() > windows

        await until(more)

    async def until_follows(self, leader: str) -> None:
        """Wait until the suite's own scheduler knows that another one leads."""

        async def follows() -> bool:
            return list((await self.fleet()).waiting_for) == [f"the lead, which {leader} has"]

        await until(follows)

    async def until_led(self) -> None:
        """Wait until the suite's own scheduler leads and knows of all workers."""

        async def leads() -> bool:
            with suppress(grpc.aio.AioRpcError):
                fleet = await self.fleet()
                ids = {worker.worker_id for worker in fleet.workers}
                return not fleet.waiting_for and ids.issuperset(self.workers)
            return False

        await until(leads)

    @asynccontextmanager
    async def moving(self, num_layers: int, *, loaded: bool = False) -> AsyncIterator["Move"]:
        """The scheduler hangs while all workers load another placement, or when all have ``loaded`` it. It goes on
        after the block, and the end of the move is waited for, whatever that is."""
        while True:
            await self.until_led()
            before, pulled = await self.placement(), await self.pulled()
            known = self._planned()
            after = rotated(before, num_layers)
            applying = asyncio.create_task(self.apply(after))
            try:
                await self._until_all_load(pulled, applying)
                with paused(self.suite, "scheduler"):
                    caught = not loaded or await self._have_loaded(before, after)
                    if caught and await committed_epoch(self.bus) == before.epoch:
                        [epoch] = self._planned() - known
                        yield Move(before, after, epoch, applying)
                        return
            finally:
                await asyncio.gather(applying, return_exceptions=True)

    async def _until_all_load(self, before: list[float], applying: "asyncio.Task[int]") -> None:
        async def all_load() -> bool:
            now = await self.pulled()
            return applying.done() or all(n > b for n, b in zip(now, before, strict=True))

        await until(all_load)

    def _planned(self) -> set[int]:
        return {entry["epoch"] for entry in events(self.suite, "scheduler", "placement.planned")}

    async def _have_loaded(self, *placements: Placement) -> bool:
        """Wait until all workers have loaded all of these, but not for longer than they keep the call of a scheduler
        that hangs."""
        wanted = await self.bytes_of(*placements)
        with suppress(TimeoutError):
            async with asyncio.timeout(CALLS_BREAK_S):
                while [(await self.slots(name)).resident_bytes for name in self.workers] != wanted:
                    await asyncio.sleep(POLL_S)
                return True
        return False


@dataclass(frozen=True)
class Move:
    """A placement that is being made."""

    before: Placement
    after: Placement
    epoch: int
    applying: "asyncio.Task[int]"


@asynccontextmanager
async def control(suite: Suite) -> AsyncIterator[Control]:
    """The control plane of this suite for the length of the block."""
    url = environment(suite)["MOESAIC_REDIS_URL"]
    async with Bus.connect(url, "default", credentials=suite.credentials) as bus:
        yield Control(suite, bus)


class Scheduler:
    """A scheduler beside the suite's own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self._log = process, log

    def events(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Return its log entries of one kind."""
        entries = log_entries(self._log)
        return [e for e in entries if e["event"] == event and fields.items() <= e.items()]

    async def until(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait until it has logged this."""
        return (await until(lambda: self.events(event, **fields)))[0]


@asynccontextmanager
async def another_scheduler(suite: Suite, worker_id: str) -> AsyncIterator[Scheduler]:
    """One more scheduler, with the settings of the suite's own; it leaves in order at the end."""
    path = suite.directory / "run" / f"{worker_id}.log"
    with path.open("wb") as log:  # of another of that name, if there was one, nothing is kept
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moesaic.services.scheduler", "--worker-id", worker_id),
            *("--host", "127.0.0.1"),
            env=environment(suite),
            stdout=log,
            stderr=log,
        )
    try:
        yield Scheduler(process, path)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        await process.wait()


def environment(suite: Suite) -> dict[str, str]:
    """Read the settings that the services have beside their flags."""
    variables = Path(f"/proc/{suite.pid('gateway')}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)


async def cli(suite: Suite, *arguments: str) -> Any:
    """Run a command and decode the JSON that it prints."""
    done = await asyncio.to_thread(suite.cli, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


async def planned(suite: Suite, file: Path) -> dict[str, Any]:
    """A plan that moves experts: of one of two policies at least, for they disagree once the scheduler knows of
    traffic."""

    async def moves() -> dict[str, Any] | None:
        for policy in ("eplb", "uniform"):
            plan = await cli(suite, "placement", "plan", "--policy", policy, "--out", str(file))
            if plan["moves"]:
                return dict(plan)
        return None

    return await until(moves)
