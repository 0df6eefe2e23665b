"""ExpertService: wire -> domain -> wire."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import structlog

from moesaic.cluster.placements import decode_placement
from moesaic.cluster.statuses import errors_as_status
from moesaic.dispatch.host import ExpertHost
from moesaic.errors import NotReady
from moesaic.kernels.own_thread import on_own_thread
from moesaic.v1 import expert_pb2 as pb
from moesaic.v1 import expert_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
A = TypeVar("A")
R = TypeVar("R")
log = structlog.get_logger()


class ExpertAdmin(expert_pb2_grpc.ExpertServiceServicer):
    """Loads and switches placements, one at a time."""

    def __init__(self) -> None:
        self.host: ExpertHost | None = None  # set once the checkpoint is open
        self._loading = asyncio.Lock()

    def _host(self) -> ExpertHost:
        if self.host is None:
            raise NotReady("this expert worker is still opening its checkpoint")
        return self.host

    async def _in_turn(self, call: Callable[[A], R], argument: A) -> R:
        """Call the host on a thread, after the calls before; to its end, even if the caller leaves
        meanwhile: a thread cannot be stopped, and must not meet the next one."""

        async def turn() -> R:
            async with self._loading:
                return await on_own_thread(call, argument)

        return await asyncio.shield(asyncio.create_task(turn()))

    async def PreparePlacement(
        self, request: pb.PreparePlacementRequest, context: Context
    ) -> pb.PreparePlacementResponse:
        """Load what this worker lacks; repeating a call changes nothing."""
        async with errors_as_status(context):
            host, placement = self._host(), decode_placement(request.placement)
            started = time.monotonic()
            result = await self._in_turn(host.prepare, placement)
            seconds = time.monotonic() - started
            log.info(
                "placement.prepared",
                epoch=placement.epoch,
                loaded=result.loaded,
                kept=result.kept,
                load_s=round(seconds, 3),
            )
            return pb.PreparePlacementResponse(
                loaded=result.loaded, kept=result.kept, seconds=seconds
            )

    async def CommitPlacement(
        self, request: pb.CommitPlacementRequest, context: Context
    ) -> pb.CommitPlacementResponse:
        """Put a prepared epoch in force."""
        async with errors_as_status(context):
            host = self._host()
            host.commit(request.epoch)
            log.info("placement.committed", epoch=request.epoch, resident_bytes=host.resident_bytes)
            return pb.CommitPlacementResponse(epoch=host.epoch)

    async def AbortPlacement(
        self, request: pb.AbortPlacementRequest, context: Context
    ) -> pb.AbortPlacementResponse:
        """Forget a prepared epoch."""
        async with errors_as_status(context):
            await self._in_turn(self._host().abort, request.epoch)
            return pb.AbortPlacementResponse()

    async def ListSlots(
        self, request: pb.ListSlotsRequest, context: Context
    ) -> pb.ListSlotsResponse:
        """The expert in every slot of the epoch in force."""
        async with errors_as_status(context):
            host = self._host()
            return pb.ListSlotsResponse(
                epoch=host.epoch,
                slots_per_layer=host.slots_per_layer,
                resident_bytes=host.resident_bytes,
                slots=[
                    pb.Slot(layer=layer, slot_id=slot, expert_id=expert)
                    for layer, experts in host.slots().items()
                    for slot, expert in enumerate(experts)
                ],
            )
