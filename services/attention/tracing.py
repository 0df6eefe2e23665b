"""The choices of gates, as a stream, for as long as somebody reads it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np

from moesaic.dispatch.tracing import ChosenExperts, StepTracer
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import Gate
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.engine import RunningEngine
from moesaic.v1 import attention_pb2 as pb

MAX_WAITING_STEPS = 512  # later ones are dropped, and counted, until some have been read
MAX_IDS_BYTES = 1 << 20  # of one message, unless one layer has more

OpenGates = Callable[[], dict[int, Gate]]


async def traced(
    config: ModelConfig, engine: RunningEngine, open_gates: OpenGates
) -> AsyncIterator[pb.RecordTraceResponse]:
    """Watch the engine's steps for ever; the caller stops the watching."""
    waiting: asyncio.Queue[ChosenExperts] = asyncio.Queue(MAX_WAITING_STEPS)
    main_loop, dropped = asyncio.get_running_loop(), 0

    def keep(chosen: ChosenExperts) -> None:
        nonlocal dropped
        try:
            waiting.put_nowait(chosen)
        except asyncio.QueueFull:
            dropped += 1

    def tell(chosen: ChosenExperts) -> None:
        main_loop.call_soon_threadsafe(keep, chosen)

    tracer = StepTracer(await on_own_thread(open_gates), tell)
    engine.trace(tracer)
    yield pb.RecordTraceResponse(
        shape=pb.TraceShape(
            model_digest=config.digest,
            num_experts=config.moe.num_experts,
            top_k=config.moe.top_k,
            layers=config.moe_layers,
        )
    )
    while True:
        for layers in _pieces(await waiting.get(), dropped):
            yield pb.RecordTraceResponse(layers=layers)


def _pieces(chosen: ChosenExperts, dropped: int) -> Iterator[pb.TracedLayers]:
    ids = chosen.topk_ids.numpy().astype("<u2")  # [L, T, k]
    at_once = max(1, MAX_IDS_BYTES // ids[0].nbytes)
    for start in range(0, len(ids), at_once):
        piece = np.ascontiguousarray(ids[start : start + at_once])
        yield pb.TracedLayers(
            rows=ids.shape[1],
            decode_rows=chosen.decode_rows,
            num_layers=len(piece),
            topk_ids=piece.tobytes(),
            dropped_steps=dropped,
        )
