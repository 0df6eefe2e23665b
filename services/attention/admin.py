"""``AttentionService``, as gRPC calls it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import structlog

from moesaic.cluster.rpc.statuses import errors_as_status
from moesaic.engine.load import EngineLoad
from moesaic.engine.sequences.grammar import GrammarCompiler
from moesaic.errors import NotReady, Overloaded
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.attention.engine import RunningEngine
from moesaic.services.attention.execute import OpenRequests
from moesaic.services.attention.streams import next_response
from moesaic.services.attention.tracing import OpenGates, traced
from moesaic.services.attention.wire import encode_brownout
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1 import attention_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()


class AttentionAdmin(attention_pb2_grpc.AttentionServiceServicer):
    """Answers before there is an engine too. Lives on the main loop.

    Attributes:
        requests: of all gateways.
        streams: that they come on.
        load: of the engine, as it was last seen.
    """

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        """``directory`` has the model's tokenizer, for grammars."""
        compiler = GrammarCompiler(directory, config.vocab_size, config.eos_token_ids)
        self.requests = OpenRequests(config, compiler)
        self.streams = self.requests.streams
        self.load = EngineLoad(0, 0, 0, 0, 0, ("the checkpoint to be loaded",))
        self._config = config
        self._open_gates: OpenGates = dict
        self._tracing = asyncio.Lock()

    def attach(
        self,
        config: ModelConfig,
        engine: RunningEngine,
        profile: pb.EngineProfile,
        open_gates: OpenGates,
    ) -> None:
        """Start taking requests.

        Args:
            config: with the digest of the weights.
            engine: computes them.
            profile: describes the engine to gateways.
            open_gates: reads the gates for whoever records a trace.
        """
        self._config, self._open_gates = config, open_gates
        self.requests.engine = engine
        self.streams.describe(profile)

    def detach(self) -> None:
        """Take no more requests: the engine is about to end."""
        self.requests.engine = None

    def drain(self, on: bool) -> None:
        """Refuse new requests, or take them again."""
        self.requests.draining = on

    async def is_idle(self) -> bool:
        """Tell whether no request is open."""
        return len(self.requests) == 0

    def beat(self) -> None:
        """Show gateways that the engine lives, and what it has to do."""
        self.requests.beat(self.load.outstanding)

    async def finish(self, grace_s: float) -> None:
        """Let open requests run to their ends for ``grace_s``, then fail them for others to take."""
        log.info("worker.draining", open=len(self.requests))
        try:
            async with asyncio.timeout(grace_s):
                await self.requests.idle.wait()
        except TimeoutError:
            self.requests.fail_all(NotReady("this attention worker stopped", code="draining"))

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        """Serve one gateway's stream."""
        async with errors_as_status(context), self.requests.serve(request_iterator) as queue:
            while (response := await next_response(queue)) is not None:
                yield response

    async def RecordTrace(
        self, request: pb.RecordTraceRequest, context: Context
    ) -> AsyncIterator[pb.RecordTraceResponse]:
        """Stream the experts that are chosen, while the caller reads."""
        async with errors_as_status(context):
            if self._tracing.locked():
                raise Overloaded("a trace of this attention worker is being recorded already")
            async with self._tracing:
                engine = self.requests.engine
                if engine is None:
                    raise NotReady("this attention worker has no engine now")
                try:
                    async for response in traced(self._config, engine, self._open_gates):
                        yield response
                finally:
                    # Else it has ended.
                    if self.requests.engine is engine:
                        engine.trace(None)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Tell what there is to do now."""
        load = self.load
        return pb.GetLoadResponse(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            epoch=load.epoch,
            brownout=encode_brownout(load.brownout),
            num_rows=load.num_rows,
        )
