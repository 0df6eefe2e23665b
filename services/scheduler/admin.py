"""SchedulerService: domain -> wire."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from moesaic.cluster.placement_view import PlacementView
from moesaic.cluster.placements import encode_placement
from moesaic.cluster.registry import Fleet
from moesaic.cluster.statuses import errors_as_status
from moesaic.errors import NotReady
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import scheduler_pb2 as pb
from moesaic.v1 import scheduler_pb2_grpc
from services.scheduler.placer import Placer

_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerAdmin(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers from what the scheduler knows; it knows nothing before ``open``."""

    def __init__(self) -> None:
        self._parts: tuple[Fleet, PlacementView, Placer] | None = None

    def open(self, fleet: Fleet, view: PlacementView, placer: Placer) -> None:
        """Answer from these from now on."""
        self._parts = fleet, view, placer

    async def GetPlacement(
        self, request: pb.GetPlacementRequest, context: _Context
    ) -> pb.GetPlacementResponse:
        """The committed placement; NOT_FOUND while there is none."""
        async with errors_as_status(context):
            _, view, placer = self._opened()
            if view.current is None:
                text = "; ".join(["no placement is committed yet", *placer.waiting_for])
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            return pb.GetPlacementResponse(placement=encode_placement(view.current))

    async def WatchPlacement(
        self, request: pb.WatchPlacementRequest, context: _Context
    ) -> AsyncIterator[pb.WatchPlacementResponse]:
        """The committed placement now, and later ones; a slow reader may miss all but the last."""
        async with errors_as_status(context):
            _, view, _ = self._opened()
            while True:
                seen = view.version
                if view.current is not None:
                    yield pb.WatchPlacementResponse(placement=encode_placement(view.current))
                await view.changed(seen)

    async def GetFleet(self, request: pb.GetFleetRequest, context: _Context) -> pb.GetFleetResponse:
        """Every registered worker, by role and id."""
        async with errors_as_status(context):
            fleet, _, placer = self._opened()
            records = sorted(fleet.workers.values(), key=lambda r: (r.role, r.worker_id))
            return pb.GetFleetResponse(
                workers=[_encode_worker(record) for record in records],
                waiting_for=placer.waiting_for,
            )

    def _opened(self) -> tuple[Fleet, PlacementView, Placer]:
        if self._parts is None:
            raise NotReady("the scheduler is still waiting for Redis")
        return self._parts


def _encode_worker(record: WorkerRecord) -> pb.FleetWorker:
    return pb.FleetWorker(
        worker_id=record.worker_id,
        generation=record.generation,
        role=record.role,
        state=record.state,
        admin_address=record.admin_address,
        data_address=record.data_address,
        slots_per_layer=record.slots_per_layer,
        model_digest=record.model_digest,
        node=record.node,
    )
