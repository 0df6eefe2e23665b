"""AttentionService: streams of commands to the engine, streams of events back."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from moesaic.cluster.statuses import errors_as_status
from moesaic.engine.engine import Engine, Load
from moesaic.engine.grammar import GrammarCompiler
from moesaic.engine.outstanding import Outstanding
from moesaic.engine.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    Generation,
    Request,
    RequestKey,
)
from moesaic.engine.thread import EngineThread
from moesaic.errors import InvalidInput, MoesaicError, NotReady, Overloaded
from moesaic.models.config import ModelConfig
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1 import attention_pb2_grpc
from services.attention.block_log import BlockLog
from services.attention.tracing import OpenGates, traced
from services.attention.wire import compile_grammar, decode_submit, encode_event, encode_events

Context = grpc.aio.ServicerContext[Any, Any]
Responses = asyncio.Queue[pb.ExecuteResponse | None]  # None ends the stream
log = structlog.get_logger()

MAX_QUEUED_EVENTS = 65536  # a gateway that reads so slowly that this fills up has its stream ended
MAX_TOGETHER_BYTES = 1 << 16  # of the events in one message, the last excepted


class AttentionAdmin(attention_pb2_grpc.AttentionServiceServicer):
    """Owns the streams; lives on the main loop."""

    def __init__(self, config: ModelConfig, compiler: GrammarCompiler) -> None:
        self._config, self._compiler = config, compiler
        self._thread: EngineThread | None = None
        self._engine: Engine | None = None
        self._open_gates: OpenGates = dict
        self._tracing = asyncio.Lock()
        self._streams: dict[int, Responses] = {}
        self._next_stream = itertools.count(1)
        self._blocks = BlockLog(pb.EngineProfile())
        self._watching: set[int] = set()  # streams that are told of blocks
        self._told_others: dict[int, pb.OthersWork] = {}  # what these know of each other's work
        self._open: set[RequestKey] = set()
        self.idle = asyncio.Event()  # set while no request is open
        self.idle.set()
        self.draining = False
        self.load = Load(0, 0, 0, 0, 0, ("the checkpoint to be loaded",))

    def attach(
        self,
        config: ModelConfig,
        thread: EngineThread,
        engine: Engine,
        profile: pb.EngineProfile,
        open_gates: OpenGates,
    ) -> None:
        """Start taking requests.

        Args:
            config: with the digest of the weights.
            thread: of the engine.
            engine: what computes.
            profile: what gateways are told of the engine.
            open_gates: reads the gates for whoever records a trace.
        """
        self._config = config
        self._thread, self._engine, self._open_gates = thread, engine, open_gates
        self._blocks = BlockLog(profile)
        for stream in self._watching:
            self._tell_all_blocks(stream)

    def describe(self, profile: pb.EngineProfile) -> None:
        """More is known of the engine now: gateways are told everything anew."""
        self._blocks.describe(profile)
        for stream in list(self._watching):
            self._tell_all_blocks(stream)

    def detach(self) -> None:
        """Take no more requests: the engine is about to end."""
        self._thread = self._engine = None

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._open)

    def deliver(self, events: list[Event]) -> None:
        """Hand a step's events to their streams; on the main loop."""
        live = [event for event in events if event.key in self._open]  # not cancelled meanwhile
        for event, response in encode_events(live):
            if isinstance(event, FinishEvent | FailureEvent):
                self._close(event.key)
            queue = self._streams.get(event.key.stream)
            if queue is None:
                continue
            queue.put_nowait(response)
            self._end_if_unread(event.key.stream, queue)

    def deliver_blocks(self, stored: list[bytes], evicted: list[bytes]) -> None:
        """Tell every stream that wants to know what changed in the prefix cache; on the main loop."""
        change = self._blocks.change(stored, evicted)
        for stream in list(self._watching):
            queue = self._streams[stream]
            queue.put_nowait(change)
            self._end_if_unread(stream, queue)

    def _end_if_unread(self, stream: int, queue: Responses) -> None:
        if queue.qsize() >= MAX_QUEUED_EVENTS:
            log.error("stream.overflow", stream=stream)
            queue.put_nowait(None)
            self._leave(stream)

    def _tell_all_blocks(self, stream: int) -> None:
        self._watching.add(stream)
        for part in self._blocks.snapshot():
            self._streams[stream].put_nowait(part)

    def fail_open(self, error: MoesaicError) -> None:
        """End every request that is open with ``error``."""
        for key in list(self._open):
            self._cancel(key)
            queue = self._streams.get(key.stream)
            if queue is not None:
                queue.put_nowait(encode_event(FailureEvent(key, error)))

    def beat(self) -> None:
        """Show whoever waits for answers that the engine lives, though it may have no news for long;
        and every gateway what the others have it do."""
        for stream in self._watching:
            others = self._work_of_others(stream)
            if others != self._told_others.get(stream, pb.OthersWork()):
                self._told_others[stream] = others
                self._streams[stream].put_nowait(pb.ExecuteResponse(others_work=others))
        for stream in {key.stream for key in self._open}:
            queue = self._streams.get(stream)
            if queue is not None and queue.empty():
                queue.put_nowait(pb.ExecuteResponse())

    def _work_of_others(self, stream: int) -> pb.OthersWork:
        total = Outstanding()
        for other, theirs in self.load.outstanding.items():
            if other != stream:
                total = total.plus(theirs)
        return pb.OthersWork(
            num_requests=total.num_requests, num_tokens=total.num_tokens, flops=float(total.flops)
        )

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        """One gateway's stream; when it ends, its requests are cancelled."""
        async with errors_as_status(context):
            stream = next(self._next_stream)
            queue: Responses = asyncio.Queue()
            self._streams[stream] = queue
            reader = asyncio.create_task(self._read(request_iterator, stream, queue))
            try:
                while (response := await queue.get()) is not None:
                    yield _with_others(response, queue)
            finally:
                reader.cancel()
                self._leave(stream)

    def _leave(self, stream: int) -> None:
        """Nobody will read this stream's events any more; calling it again changes nothing."""
        self._streams.pop(stream, None)
        self._watching.discard(stream)
        self._told_others.pop(stream, None)
        for key in [key for key in self._open if key.stream == stream]:
            self._cancel(key)

    async def _read(
        self,
        commands: AsyncIterator[pb.ExecuteRequest],
        stream: int,
        queue: Responses,
    ) -> None:
        try:
            async with asyncio.TaskGroup() as compiling:
                async for command in commands:
                    kind = command.WhichOneof("command")
                    if kind == "cancel":
                        self._cancel(
                            RequestKey(command.cancel.request_id, command.cancel.attempt, stream)
                        )
                    elif kind == "watch_blocks":
                        if stream in self._streams:  # not one that was ended meanwhile
                            self._tell_all_blocks(stream)
                    else:
                        self._submit(command.submit, stream, queue, compiling)
        finally:
            queue.put_nowait(None)

    def _submit(
        self, submit: pb.Submit, stream: int, queue: Responses, compiling: asyncio.TaskGroup
    ) -> None:
        key = RequestKey(submit.request_id, submit.attempt, stream)
        try:
            if self._engine is None or self._thread is None:
                raise NotReady("this attention worker has no engine now")
            if self.draining:
                raise NotReady("this attention worker is draining", code="draining")
            if key in self._open:
                raise InvalidInput("request_id", f"{submit.request_id!r} is running already")
            request = decode_submit(
                submit, stream, self._config.vocab_size, tuple(self._config.eos_token_ids)
            )
        except MoesaicError as error:
            queue.put_nowait(encode_event(FailureEvent(key, error)))
            return
        self._open.add(key)
        self.idle.clear()
        if submit.generation.HasField("grammar"):
            compiling.create_task(self._submit_compiled(request, submit.generation.grammar, queue))
        else:
            self._thread.call(self._engine.submit, request)

    async def _submit_compiled(
        self, request: Request, grammar: pb.Grammar, queue: Responses
    ) -> None:
        """Compile a grammar beside everything else; the request may be cancelled meanwhile."""
        try:
            compiled = await compile_grammar(self._compiler, grammar)
        except Exception as failure:  # of this request alone: others share its stream
            error = failure
            if not isinstance(error, MoesaicError):
                log.exception("grammar.failed")
                error = MoesaicError("the grammar was not compiled; see the worker's log")
            if request.key in self._open:
                self._close(request.key)
                queue.put_nowait(encode_event(FailureEvent(request.key, error)))
            return
        if request.key in self._open and self._thread is not None and self._engine is not None:
            assert isinstance(request.work, Generation)  # only these have grammars
            work = dataclasses.replace(request.work, grammar=compiled)
            self._thread.call(self._engine.submit, dataclasses.replace(request, work=work))

    def _close(self, key: RequestKey) -> None:
        self._open.discard(key)
        if not self._open:
            self.idle.set()

    def _cancel(self, key: RequestKey) -> None:
        self._close(key)
        if self._engine is not None and self._thread is not None:
            self._thread.call(self._engine.cancel, key)

    async def RecordTrace(
        self, request: pb.RecordTraceRequest, context: Context
    ) -> AsyncIterator[pb.RecordTraceResponse]:
        """Which experts are chosen, while the caller reads."""
        async with errors_as_status(context):
            if self._tracing.locked():
                raise Overloaded("a trace of this attention worker is being recorded already")
            async with self._tracing:
                if self._engine is None or self._thread is None:
                    raise NotReady("this attention worker has no engine now")
                engine, thread = self._engine, self._thread
                try:
                    async for response in traced(self._config, engine, thread, self._open_gates):
                        yield response
                finally:
                    if self._thread is thread:  # else the engine has ended
                        thread.call(engine.trace, None)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """What there is to do now."""
        load = self.load
        return pb.GetLoadResponse(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            epoch=load.epoch,
        )


def _with_others(response: pb.ExecuteResponse, queue: Responses) -> pb.ExecuteResponse:
    """``response`` and what waits behind it, as far as that is small: sending takes as long for one as for many."""
    responses, size = [response], response.ByteSize()
    while size < MAX_TOGETHER_BYTES and not queue.empty():
        following = queue.get_nowait()
        if following is None:  # the end, which has to be seen
            queue.put_nowait(None)
            break
        responses.append(following)
        size += following.ByteSize()
    return pb.ExecuteResponse(together=responses) if len(responses) > 1 else response
