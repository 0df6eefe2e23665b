"""Facts about the services of a cluster, asked of them over gRPC."""

import asyncio
from typing import Any

import grpc

from moesaic.cli.clients.credentials import answer, answer_if_any
from moesaic.cli.clients.load import service_load
from moesaic.cli.clients.sites import ROLE, site_facts
from moesaic.placement.decide.proposal import LITTLE_ROOM
from moesaic.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

STATES = {
    admin_pb2.SERVICE_STATE_UNSPECIFIED: "unknown",
    admin_pb2.SERVICE_STATE_STARTING: "starting",
    admin_pb2.SERVICE_STATE_READY: "ready",
    admin_pb2.SERVICE_STATE_DRAINING: "draining",
    admin_pb2.SERVICE_STATE_STANDBY: "standby",
}
_SCHEDULER = scheduler_pb2_grpc.SchedulerServiceStub
_TOLD = (
    *(
        "pid",
        "generation",
        "version",
        "epoch",
        "data_address",
        "weights_address",
        "metrics_address",
    ),
    *("model", "model_digest", "dtype", "quantization"),
)
UNREACHABLE = "unreachable"
REFUSED = ("unauthenticated", "permission_denied")  # the details say what to do

Facts = dict[str, Any]


async def service_facts(role: str, worker_id: str, admin_address: str) -> Facts:
    """One service as its ``AdminService`` shows it; state ``unreachable`` if it does not answer."""
    facts: Facts = {"role": role, "id": worker_id, "admin_address": admin_address}
    stub, request = admin_pb2_grpc.AdminServiceStub, admin_pb2.GetInfoRequest()
    try:
        info = await answer(admin_address, stub, "GetInfo", request)
    except grpc.aio.AioRpcError as error:
        return {**facts, "state": UNREACHABLE, "waiting_for": [_why(error)]}
    told = {name: getattr(info, name) for name in _TOLD}
    waits = list(info.waiting_for)
    state = STATES.get(info.state, "unknown")
    return {
        **facts,
        "state": state,
        **told,
        "uptime_s": round(info.uptime_s, 1),
        "waiting_for": waits,
    }


async def lacks_placement(scheduler: str) -> list[str]:
    """Ask a scheduler why no experts are placed yet.

    Returns:
        Reasons; none if they are placed, and where none is needed: edge agents serve without a scheduler, and without
        room for all experts.
    """
    facts = await service_facts("scheduler", "scheduler", scheduler)
    waiting_for: list[str] = facts["waiting_for"]
    if facts["state"] == UNREACHABLE or facts.get("epoch"):
        return []
    if any(each.startswith(LITTLE_ROOM) for each in waiting_for):
        return []
    return waiting_for or ["the first placement"]


def _why(error: grpc.aio.AioRpcError) -> str:
    status = error.code().name.lower()
    return f"{status}: {error.details()}" if status in REFUSED else status


async def fleet_addresses(scheduler: str) -> dict[str, tuple[str, str]]:
    """Role and admin address of every registered worker by id; empty without a scheduler."""
    reply = await answer_if_any(scheduler, _SCHEDULER, "GetFleet", scheduler_pb2.GetFleetRequest())
    if reply is None:
        return {}
    return {worker.worker_id: (worker.role, worker.admin_address) for worker in reply.workers}


async def placement_facts(scheduler: str) -> Facts | None:
    """The committed placement in short; None if there is none, or no scheduler answers."""
    request = scheduler_pb2.GetPlacementRequest()
    reply = await answer_if_any(scheduler, _SCHEDULER, "GetPlacement", request)
    if reply is None:
        return None
    placement = reply.placement
    held = [
        [
            sorted(expert for expert in layer.workers[index].expert_ids if expert >= 0)
            for layer in placement.layers
        ]
        for index in range(len(placement.workers))
    ]
    return {
        "epoch": placement.epoch,
        "layers": [layer.layer for layer in placement.layers],
        "workers": [
            {"id": worker.worker_id, "generation": worker.generation, "experts": experts}
            for worker, experts in zip(placement.workers, held, strict=True)
        ],
    }


async def decision_facts(scheduler: str) -> Facts | None:
    """The policy, the number of pins and the last decision; None if no scheduler answers."""
    from moesaic.cli.clients.decisions import as_dict

    request = scheduler_pb2.GetDecisionsRequest(limit=1)
    reply = await answer_if_any(scheduler, _SCHEDULER, "GetDecisions", request)
    if reply is None:
        return None
    last = as_dict(reply.decisions[0]) if reply.decisions else None
    return {"policy": reply.policy, "num_pins": len(reply.pins), "last_decision": last}


async def gather_facts(
    known: dict[str, tuple[str, str]], scheduler: str | None
) -> tuple[list[Facts], Facts | None]:
    """Ask every service, known beforehand or registered with the scheduler, and for the placement.

    Args:
        known: role and admin address by id.
        scheduler: the scheduler's admin address, if there is one.
    """
    registered = await fleet_addresses(scheduler) if scheduler else {}
    services = {**registered, **known}

    async def ask(name: str, role: str, address: str) -> Facts:
        facts, load, edge = await asyncio.gather(
            service_facts(role, name, address),
            service_load(role, address),
            site_facts(address) if role == ROLE else asyncio.sleep(0, {}),
        )
        return {**facts, "load": load, **({"edge": edge} if edge else {})}

    facts = await asyncio.gather(
        *(ask(name, role, address) for name, (role, address) in services.items())
    )
    placement = await placement_facts(scheduler) if scheduler else None
    if placement is not None and scheduler:
        placement["decided_by"] = await decision_facts(scheduler)
    return list(facts), placement
