"""Calls to expert workers: prepare a placement, confirm it, or abort it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import grpc
import structlog

from moesaic.cluster.placements import encode_placement
from moesaic.cluster.rpc.channels import CONTROL_TIMEOUT_S, channel
from moesaic.cluster.rpc.statuses import as_error
from moesaic.errors import MoesaicError
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.services.scheduler.epochs.patience import Patience, while_it_loads
from moesaic.telemetry import spans
from moesaic.v1 import admin_pb2, admin_pb2_grpc, expert_pb2_grpc
from moesaic.v1 import expert_pb2 as pb

log = structlog.get_logger()


async def prepare(
    placement: Placement,
    serving: Placement | None,
    load_share: Callable[[PlacedWorker], float],
    timeout_s: float,
    failed: Callable[[PlacedWorker, MoesaicError], None],
) -> None:
    """Have all workers load their missing experts; the first failure ends the wait for the others.

    Args:
        placement: placement to prepare.
        serving: the placement committed last, if there is one. Its workers can give experts to others, and a
            worker that missed its commit learns of it now.
        load_share: share of each worker's time for loading; the rest is for serving.
        timeout_s: time limit of each worker, if it did nothing else; a worker that loads has more, see ``Patience``.
        failed: called with each worker that failed, and the reason.

    Raises:
        MoesaicError: the first failure.
    """

    async def one(worker: PlacedWorker) -> None:
        try:
            with spans.within("load", {"moesaic.worker_id": worker.worker_id}):
                await _prepare_one(worker, placement, timeout_s, serving, load_share(worker))
        except MoesaicError as error:
            failed(worker, error)
            raise

    try:
        async with asyncio.TaskGroup() as calls:
            for worker in placement.workers:
                calls.create_task(one(worker))
    except* MoesaicError as failures:
        raise failures.exceptions[0] from failures


async def confirm(worker: PlacedWorker, placement: Placement, timeout_s: float) -> None:
    """Put a committed placement in force on one worker; repeating it changes nothing.

    Preparing comes first, for a worker that has lost what it prepared.

    Raises:
        MoesaicError: it failed.
    """
    await _prepare_one(worker, placement, timeout_s)
    async with _calling(worker) as stub:
        await stub.CommitPlacement(
            pb.CommitPlacementRequest(epoch=placement.epoch), timeout=CONTROL_TIMEOUT_S
        )


async def abort(placement: Placement) -> None:
    """Have workers free what they prepared.

    A worker that does not answer frees it when the epoch in force is confirmed.
    """

    async def abort_one(worker: PlacedWorker) -> None:
        with suppress(MoesaicError):
            async with _calling(worker) as stub:
                await stub.AbortPlacement(
                    pb.AbortPlacementRequest(epoch=placement.epoch), timeout=CONTROL_TIMEOUT_S
                )

    await asyncio.gather(*(abort_one(worker) for worker in placement.workers))


async def _prepare_one(
    worker: PlacedWorker,
    placement: Placement,
    timeout_s: float,
    serving: Placement | None = None,
    load_share: float = 1.0,
) -> None:
    request = pb.PreparePlacementRequest(
        placement=encode_placement(placement), load_share=load_share
    )
    if serving is not None and serving.model_digest == placement.model_digest:
        request.serving.CopyFrom(encode_placement(serving))
    async with _connected(worker) as connection:
        stub = expert_pb2_grpc.ExpertServiceStub(connection)

        async def call() -> pb.PreparePlacementResponse:
            return await stub.PreparePlacement(request)

        patience = Patience(worker.worker_id, timeout_s, load_share, time.monotonic())
        answer = await while_it_loads(call(), partial(_loading, connection), patience)
    log.info(
        "placement.prepared",
        epoch=placement.epoch,
        worker_id=worker.worker_id,
        loaded=answer.loaded,
        kept=answer.kept,
        pulled=answer.pulled,
        load_s=round(answer.seconds, 3),
    )


async def _loading(connection: grpc.aio.Channel) -> admin_pb2.Loading | None:
    """Ask a worker what it loads; None: nothing, or it does not answer."""
    stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(connection)
    try:
        info = await stub.GetInfo(admin_pb2.GetInfoRequest(), timeout=CONTROL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    return info.loading if info.HasField("loading") else None


@asynccontextmanager
async def _connected(worker: PlacedWorker) -> AsyncIterator[grpc.aio.Channel]:
    try:
        async with channel(worker.admin_address, worker.worker_id) as connection:
            yield connection
    except grpc.aio.AioRpcError as error:
        raise as_error(error, worker.worker_id) from error


@asynccontextmanager
async def _calling(worker: PlacedWorker) -> AsyncIterator["expert_pb2_grpc.ExpertServiceAsyncStub"]:
    async with _connected(worker) as connection:
        yield expert_pb2_grpc.ExpertServiceStub(connection)
