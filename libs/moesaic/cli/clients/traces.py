"""Reads the traces that attention workers stream."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from moesaic.cli.clients.credentials import connected
from moesaic.cluster.rpc.statuses import as_error
from moesaic.errors import InvalidInput
from moesaic.placement.traffic.trace import Trace, TracedStep
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1 import attention_pb2_grpc


@dataclass
class Recording:
    """Steps that workers of one model have streamed so far."""

    part: str
    max_rows: int  # about so many
    before: Trace | None = None  # the recording is added to it
    enough: asyncio.Event = field(default_factory=asyncio.Event)  # ``max_rows`` are there
    shape: pb.TraceShape | None = None
    steps: list[TracedStep] = field(default_factory=list)
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # steps, by worker
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # a worker watches

    def trace(self) -> Trace:
        """Join the trace before with the recording as one part; some worker must have begun."""
        assert self.shape is not None
        recorded = Trace(
            self.shape.model_digest,
            self.shape.num_experts,
            self.shape.top_k,
            tuple(self.shape.layers),
            (self.part,),
            tuple(self.steps),
        )
        return recorded if self.before is None else self.before.joined(recorded)


async def record(recording: Recording, workers: dict[str, str], seconds: float) -> None:
    """Fill ``recording`` until the time is over or there are rows enough.

    Args:
        recording: is added to; stopping this at any time leaves whole steps in it.
        workers: admin addresses of attention workers, by id.
        seconds: how long.

    Raises:
        MoesaicError: a worker cannot be reached, records for somebody else already, or serves
            another model than the others.
    """
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as readers:
            tasks = [
                readers.create_task(_read(recording, worker_id, address))
                for worker_id, address in workers.items()
            ]
            await recording.enough.wait()
            for task in tasks:
                task.cancel()
    except TimeoutError:
        pass
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _read(recording: Recording, worker_id: str, address: str) -> None:
    parts: list[NDArray[Any]] = []
    async with connected(address) as connection:
        stub = attention_pb2_grpc.AttentionServiceStub(connection)
        try:
            async for response in stub.RecordTrace(pb.RecordTraceRequest()):
                if response.WhichOneof("event") == "shape":
                    _begin(recording, response.shape)
                else:
                    parts.append(_ids(recording, response.layers))
                    recording.dropped[worker_id] = response.layers.dropped_steps
                    parts = _complete(recording, parts, response.layers.decode_rows)
        except grpc.aio.AioRpcError as error:
            raise as_error(error, worker_id) from error


def _begin(recording: Recording, shape: pb.TraceShape) -> None:
    if recording.shape is not None and recording.shape != shape:
        raise InvalidInput("workers", "must all serve the same model")
    before = recording.before
    if before is not None and (before.model_digest, before.layers) != (
        shape.model_digest,
        tuple(shape.layers),
    ):
        raise InvalidInput("file", "holds a trace of another model")
    recording.shape = shape
    recording.begun.set()


def _ids(recording: Recording, layers: pb.TracedLayers) -> NDArray[Any]:
    assert recording.shape is not None
    ids = np.frombuffer(layers.topk_ids, "<u2")
    wide = ids.reshape(layers.num_layers, layers.rows, recording.shape.top_k)
    return wide.astype(np.uint8) if recording.shape.num_experts <= 256 else wide


def _complete(
    recording: Recording, parts: list[NDArray[Any]], decode_rows: int
) -> list[NDArray[Any]]:
    assert recording.shape is not None
    if sum(map(len, parts)) < len(recording.shape.layers):
        return parts
    recording.steps.append(TracedStep(0, decode_rows, np.concatenate(parts)))
    recording.rows += parts[0].shape[1]
    if recording.rows >= recording.max_rows:
        recording.enough.set()
    return []
