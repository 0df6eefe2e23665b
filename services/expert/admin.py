"""ExpertService: wire -> domain -> wire."""

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from traceback import clear_frames
from typing import Any, TypeVar

import grpc
import structlog

from moesaic.cluster.placements import decode_placement
from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.errors import CheckpointError, NotReady
from moesaic.experts.host import ExpertHost
from moesaic.experts.pace import LoadPace
from moesaic.experts.pull.loader import ExpertPeers
from moesaic.experts.slots import LoadResult
from moesaic.messages.placement import Placement
from moesaic.native.own_thread import on_own_thread
from moesaic.services.expert.activations import ActivationReporter
from moesaic.v1 import expert_pb2 as pb
from moesaic.v1 import expert_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")
log = structlog.get_logger()


class ExpertAdmin(expert_pb2_grpc.ExpertServiceServicer):
    """Loads and switches placements, one at a time."""

    def __init__(self) -> None:
        self.host: ExpertHost | None = None  # set once the checkpoint is open
        self.peers: ExpertPeers | None = None  # none: experts come from the checkpoint alone
        self.reporter: ActivationReporter | None = None
        self._loading = asyncio.Lock()
        self._damage: CheckpointError | None = None
        self._damaged = asyncio.Event()
        # Epochs that are being loaded, or wait for it.
        self._paces: dict[LoadPace, int] = {}

    async def until_damaged(self) -> None:
        """Wait for a fault of the model's files that keeps its cluster from ever serving; raises it.

        All workers have the same bytes, so none can load what this one cannot. Once a placement serves, a fault
        concerns the next one alone, and the scheduler goes on without that.

        Raises:
            CheckpointError: names the tensor.
        """
        await self._damaged.wait()
        assert self._damage is not None
        raise self._damage

    async def close(self) -> None:
        """Take no placements any more, and end all loading: it needs the links to peers."""
        self.host = None
        self._cancel_loading()
        async with self._loading:
            pass

    def _host(self) -> ExpertHost:
        if self.host is None:
            raise NotReady("this expert worker is still opening its checkpoint, or is stopping")
        return self.host

    async def _in_turn(self, call: Callable[[], R]) -> R:
        """Call the host on a thread, after the calls before.

        The call runs to its end, even if its caller leaves: a thread cannot be stopped, and must not
        meet the next one.
        """

        async def turn() -> R:
            async with self._loading:
                return await on_own_thread(call)

        task = asyncio.create_task(turn())
        task.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # it may have left
        return await asyncio.shield(task)

    async def PreparePlacement(
        self, request: pb.PreparePlacementRequest, context: Context
    ) -> pb.PreparePlacementResponse:
        """Load the experts that this worker lacks; repeating a call changes nothing.

        | placement | loading that ends |
        |---|---|
        | new | for earlier epochs: nobody will commit them |
        | in force already | all: the scheduler that leads now only confirms it |

        The placement that serves was committed, so it is in force here too if it was prepared.
        """
        async with errors_as_status(context):
            host, placement = self._host(), decode_placement(request.placement)
            serving = decode_placement(request.serving) if request.HasField("serving") else None
            in_force = placement.epoch == host.epochs.in_force
            self._cancel_loading(lambda epoch: in_force or epoch < placement.epoch)
            pace = LoadPace(request.load_share or 1.0)
            self._paces[pace] = placement.epoch
            started = time.monotonic()
            try:
                result, pulled = await self._in_turn(
                    lambda: self._prepare(host, placement, serving, pace)
                )
            except CheckpointError as error:
                serves = serving is not None or host.epochs.in_force
                # The scheduler can do without these.
                if not serves and not placement.num_united:
                    self._damage = error
                    self._damaged.set()
                raise
            seconds = time.monotonic() - started
            log.info(
                "placement.prepared",
                epoch=placement.epoch,
                loaded=result.loaded,
                kept=result.kept,
                pulled=pulled,
                load_s=round(seconds, 3),
            )
            return pb.PreparePlacementResponse(
                loaded=result.loaded, kept=result.kept, seconds=seconds, pulled=pulled
            )

    def _prepare(
        self, host: ExpertHost, placement: Placement, serving: Placement | None, pace: LoadPace
    ) -> tuple[LoadResult, int]:
        """Load, on a thread of its own.

        Returns:
            The result, and the number of experts that peers gave.
        """
        bring = host.files.bring(pace)
        try:
            if serving is not None and host.epochs.learn(serving):
                log.info("placement.learned", epoch=serving.epoch)
            if serving is None or self.peers is None:
                return host.loader.prepare(placement, bring, pace.num_threads), 0
            with closing(self.peers.pulling(serving, pace)) as pulling:
                pull = pulling.or_else(bring, host.files.note_pulled)
                return host.loader.prepare(placement, pull, pace.num_threads), pulling.pulled
        except Exception as error:
            # Its frames refer to experts, and whoever gets it keeps it until garbage is collected.
            clear_frames(error.__traceback__)
            raise
        finally:
            del self._paces[pace]

    def _cancel_loading(self, of: Callable[[int], bool] = lambda epoch: True) -> None:
        """End the loading for some epochs; by default for all."""
        for pace, epoch in list(self._paces.items()):
            if of(epoch):
                pace.cancel()

    async def CommitPlacement(
        self, request: pb.CommitPlacementRequest, context: Context
    ) -> pb.CommitPlacementResponse:
        """Put a prepared epoch in force."""
        async with errors_as_status(context):
            host = self._host()
            # On another thread: it waits for a request that is being answered.
            await asyncio.to_thread(host.epochs.commit, request.epoch)
            log.info(
                "placement.committed",
                epoch=request.epoch,
                resident_bytes=host.epochs.resident_bytes,
            )
            return pb.CommitPlacementResponse(epoch=host.epochs.in_force)

    async def AbortPlacement(
        self, request: pb.AbortPlacementRequest, context: Context
    ) -> pb.AbortPlacementResponse:
        """Forget a prepared epoch, or stop loading for it."""
        async with errors_as_status(context):
            host = self._host()
            self._cancel_loading(lambda epoch: epoch == request.epoch)
            await self._in_turn(lambda: host.loader.abort(request.epoch))
            return pb.AbortPlacementResponse()

    async def ListSlots(
        self, request: pb.ListSlotsRequest, context: Context
    ) -> pb.ListSlotsResponse:
        """The expert in every slot of the epoch in force."""
        async with errors_as_status(context):
            host = self._host()
            return pb.ListSlotsResponse(
                epoch=host.epochs.in_force,
                slots_per_layer=host.slots_per_layer,
                resident_bytes=host.epochs.resident_bytes,
                slots=[
                    pb.Slot(layer=layer, slot_id=slot, expert_id=expert)
                    for layer, experts in host.epochs.slots().items()
                    for slot, expert in enumerate(experts)
                ],
            )

    async def GetActivations(
        self, request: pb.ExpertServiceGetActivationsRequest, context: Context
    ) -> pb.ExpertServiceGetActivationsResponse:
        """The counts of this worker, all windows together."""
        async with errors_as_status(context):
            self._host()
            totals = self.reporter.totals if self.reporter else {}
            return pb.ExpertServiceGetActivationsResponse(
                layers=[
                    pb.CountedLayer(
                        layer=layer,
                        batches=total.batches,
                        tokens=total.tokens.tolist(),
                        active=total.active.tolist(),
                    )
                    for layer, total in sorted(totals.items())
                ]
            )
