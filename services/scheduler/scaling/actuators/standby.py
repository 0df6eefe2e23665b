"""Workers on standby, activated and told to stand by again; nothing is started or stopped."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc
import structlog
from msgspec.structs import replace

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import Fleet
from moesaic.cluster.rpc.channels import CONTROL_TIMEOUT_S, channel
from moesaic.cluster.rpc.statuses import as_error
from moesaic.errors import MoesaicError, NotReady
from moesaic.messages.placement import Placement
from moesaic.messages.registry import Role, WorkerRecord
from moesaic.messages.scaling import FleetShape
from moesaic.placement.decide.proposal import propose
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc, attention_pb2, attention_pb2_grpc

log = structlog.get_logger()

# In place of a number of requests: a worker that says it is not ready, and one that says nothing.
_GONE, _SILENT = -1, -2


class StandbyActuator:
    """Picks workers by their states in the registry alone, so that a scheduler that leads later picks no others.

    ========================  ======================================================================
    activated first           those that drain in order to stand by; then the lowest worker id, for
                              expert workers on the node that has fewest active ones
    told to stand by first    the attention worker with least work; the expert worker with the
                              highest id on the node that has most, if the others have room for
                              every expert
    ========================  ======================================================================
    """

    name = "standby"

    def __init__(self, bus: Bus, fleet: Fleet, view: PlacementView) -> None:
        """``view``: of the placement in force."""
        self._bus, self._fleet, self._view = bus, fleet, view

    async def most(self) -> FleetShape:
        """Count the workers that are active or could be; those that operators drain are not."""
        there = [r for r in self._fleet.workers.values() if r.state == "ready" or _can_come(r)]
        roles = Counter(record.role for record in there)
        return FleetShape(roles["attention"], roles["expert"])

    async def intended(self) -> FleetShape:
        """Count the workers that are active or start to be."""
        there = [
            record
            for record in self._fleet.workers.values()
            if record.state in ("ready", "starting") and not record.standing_by
        ]
        roles = Counter(record.role for record in there)
        return FleetShape(roles["attention"], roles["expert"])

    async def apply(self, wanted: FleetShape) -> None:
        """Tell as many workers as are lacking, or too many, what to do.

        Raises:
            NotReady: Redis does not answer, or too few expert workers can be spared.
            MoesaicError: a worker could not be told; all others were.
        """
        # What was told at the last look shows by now.
        await self._fleet.refresh(self._bus)
        if self._fleet.stale:
            raise NotReady("the registry cannot be read")
        numbers: dict[Role, int] = {"attention": wanted.attention, "expert": wanted.experts}
        failures: list[MoesaicError] = []
        for role, number in numbers.items():
            active = self._active(role)
            coming = [record for record in self._of(role) if _can_come(record)]
            chosen = first_to_come(active, coming, number - len(active))
            failures += await _tell_all(chosen, on_standby=False)
        for role, number in numbers.items():
            active = self._active(role)
            if len(active) > number:
                active, loads = await _that_work(active)
                try:
                    chosen = self._first_to_leave(role, active, loads, len(active) - number)
                except NotReady as error:
                    failures.append(error)
                else:
                    failures += await _tell_all(chosen, on_standby=True)
        if failures:
            raise failures[0]

    def _of(self, role: Role) -> list[WorkerRecord]:
        return [record for record in self._fleet.workers.values() if record.role == role]

    def _active(self, role: Role) -> list[WorkerRecord]:
        return [record for record in self._of(role) if record.state == "ready"]

    def _first_to_leave(
        self, role: Role, active: list[WorkerRecord], loads: dict[str, int], count: int
    ) -> list[WorkerRecord]:
        known = [record for record in active if record.worker_id in loads]
        if role == "attention":
            idlest = sorted(known, key=lambda r: (loads[r.worker_id], r.worker_id))
            return idlest[: max(0, count)]
        spared = first_to_spare(
            self._view.current, list(self._fleet.workers.values()), known, count
        )
        if count > 0 and not spared:
            raise NotReady("no expert worker can be spared: the others lack slots for its experts")
        return spared


def first_to_come(
    active: Sequence[WorkerRecord], coming: Sequence[WorkerRecord], count: int
) -> list[WorkerRecord]:
    """Choose the workers to activate.

    Args:
        active: workers of the same role.
        coming: workers that could be activated.
        count: most workers to choose.
    """
    on_node, left = Counter(map(_node, active)), list(coming)
    chosen: list[WorkerRecord] = []
    while left and len(chosen) < count:

        def order(record: WorkerRecord) -> tuple[bool, int, str]:
            crowd = on_node[_node(record)] if record.role == "expert" else 0
            return record.state != "draining", crowd, record.worker_id

        best = min(left, key=order)
        left.remove(best)
        chosen.append(best)
        on_node[_node(best)] += 1
    return chosen


def first_to_spare(
    current: Placement | None,
    records: Sequence[WorkerRecord],
    active: Sequence[WorkerRecord],
    count: int,
) -> list[WorkerRecord]:
    """Choose expert workers that can stand by: without them every expert still has a replica.

    Args:
        current: the placement in force.
        records: all workers.
        active: workers to choose from.
        count: most workers to choose.
    """
    on_node, left = Counter(map(_node, active)), list(active)
    chosen: list[WorkerRecord] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda record: (on_node[_node(record)], record.worker_id))
        left.remove(best)
        without = {record.worker_id for record in (*chosen, best)}
        after = [replace(r, state="draining") if r.worker_id in without else r for r in records]
        placement = propose(current, after).placement or current
        named = {worker.worker_id for worker in placement.workers} if placement else without
        if not named & without:
            chosen.append(best)
            on_node[_node(best)] -= 1
    return chosen


def _node(record: WorkerRecord) -> str:
    return record.node or record.worker_id


def _can_come(record: WorkerRecord) -> bool:
    """True on standby, and on the way there, unless operators drain it."""
    if record.drained:
        return False
    return record.state == "standby" or (record.state == "draining" and record.standing_by)


async def _tell_all(records: Sequence[WorkerRecord], *, on_standby: bool) -> list[MoesaicError]:
    """Tell each, and return the errors of those that could not be told."""
    failures: list[MoesaicError] = []
    for record in records:
        try:
            await _tell(record, on_standby=on_standby)
        except MoesaicError as error:
            failures.append(error)
    return failures


async def _tell(record: WorkerRecord, *, on_standby: bool) -> None:
    try:
        async with channel(record.admin_address, record.worker_id) as connection:
            stub = admin_pb2_grpc.AdminServiceStub(connection)
            if on_standby:
                await stub.StandBy(pb.StandByRequest(), timeout=CONTROL_TIMEOUT_S)
            else:
                await stub.Activate(pb.ActivateRequest(), timeout=CONTROL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise as_error(error, record.worker_id) from error
    log.info("worker.told", worker_id=record.worker_id, to="stand by" if on_standby else "work")


async def _that_work(
    records: Sequence[WorkerRecord],
) -> tuple[list[WorkerRecord], dict[str, int]]:
    """Ask workers themselves: the registry may not have heard yet that one stands by.

    Returns:
        Those that do not stand by; and the requests that each has, by id, of those that answered.
    """
    found = await asyncio.gather(*map(_requests_of, records))
    there = [record for record, num in zip(records, found, strict=True) if num != _GONE]
    loads = {r.worker_id: num for r, num in zip(records, found, strict=True) if num >= 0}
    return there, loads


async def _requests_of(record: WorkerRecord) -> int:
    """Count the requests of a worker that is ready; none of expert workers."""
    try:
        async with channel(record.admin_address, record.worker_id) as connection:
            admin = admin_pb2_grpc.AdminServiceStub(connection)
            info = await admin.GetInfo(pb.GetInfoRequest(), timeout=CONTROL_TIMEOUT_S)
            if info.state != pb.SERVICE_STATE_READY:
                return _GONE
            if record.role != "attention":
                return 0
            stub = attention_pb2_grpc.AttentionServiceStub(connection)
            load = await stub.GetLoad(attention_pb2.GetLoadRequest(), timeout=CONTROL_TIMEOUT_S)
            return int(load.num_running + load.num_waiting)
    except grpc.aio.AioRpcError:
        return _SILENT
