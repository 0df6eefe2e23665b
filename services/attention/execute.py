"""``Execute``: commands of gateways go to the engine, and its events come back."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog

from moesaic.engine.load import Outstanding
from moesaic.engine.sequences.grammar import GrammarCompiler
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    named,
)
from moesaic.errors import InvalidInput, MoesaicError, NotReady
from moesaic.models.configuration.config import ModelConfig
from moesaic.services.attention.engine import RunningEngine
from moesaic.services.attention.streams import GatewayStreams, Responses
from moesaic.services.attention.wire import (
    compile_grammar,
    decode_submit,
    encode_event,
    encode_events,
)
from moesaic.v1 import attention_pb2 as pb

log = structlog.get_logger()


class OpenRequests:
    """The requests that were taken and have not ended. Lives on the main loop.

    Attributes:
        streams: of the gateways that they came from.
        engine: computes them; ``None``: there is none yet, or no longer.
        draining: new requests are refused.
        idle: set while no request is open.
    """

    def __init__(self, config: ModelConfig, compiler: GrammarCompiler) -> None:
        self._config, self._compiler = config, compiler
        self.streams = GatewayStreams(self._cancel_all_of)
        self.engine: RunningEngine | None = None
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._open: set[RequestKey] = set()
        self._compiling: dict[RequestKey, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def serve(self, commands: AsyncIterator[pb.ExecuteRequest]) -> AsyncIterator[Responses]:
        """Serve one gateway's stream for the length of the block, and cancel its requests then.

        Gives:
            What to tell the gateway, for ``next_response``.
        """
        stream, queue = self.streams.open()
        reader = asyncio.create_task(self._read(commands, stream))
        try:
            yield queue
        finally:
            reader.cancel()
            self.streams.leave(stream)

    def deliver(self, events: list[Event]) -> None:
        """Hand a step's events to their streams."""
        # Not cancelled meanwhile
        live = [event for event in events if event.key in self._open]
        for event, response in encode_events(live):
            if isinstance(event, FinishEvent | FailureEvent):
                self._close(event.key)
            self.streams.send(event.key.stream, response)

    def beat(self, outstanding: Mapping[int, Outstanding]) -> None:
        """Show gateways that the engine lives, and what it has to do for others, by stream."""
        self.streams.tell_of_others(outstanding)
        self.streams.nudge({key.stream for key in self._open})

    def fail_all(self, error: MoesaicError) -> None:
        """End every request that is open with ``error``."""
        for key in list(self._open):
            self._cancel(key)
            self._refuse(key, error)

    async def _read(self, commands: AsyncIterator[pb.ExecuteRequest], stream: int) -> None:
        try:
            async with asyncio.TaskGroup() as compiling:
                async for command in commands:
                    kind = command.WhichOneof("command")
                    if kind == "cancel":
                        cancel = command.cancel
                        self._cancel(RequestKey(cancel.request_id, cancel.attempt, stream))
                    elif kind == "watch_blocks":
                        self.streams.watch_blocks(stream)
                    else:
                        self._submit(command.submit, stream, compiling)
        finally:
            self.streams.end(stream)

    def _submit(self, submit: pb.Submit, stream: int, compiling: asyncio.TaskGroup) -> None:
        key = RequestKey(submit.request_id, submit.attempt, stream)
        try:
            if self.engine is None:
                raise NotReady("this attention worker has no engine now")
            if self.draining:
                raise NotReady("this attention worker is draining", code="draining")
            if key in self._open:
                raise InvalidInput("request_id", f"{submit.request_id!r} is running already")
            eos_token_ids = tuple(self._config.eos_token_ids)
            request = decode_submit(submit, stream, self._config.vocab_size, eos_token_ids)
        except MoesaicError as error:
            self._refuse(key, error)
            return
        self._open.add(key)
        self.idle.clear()
        if submit.generation.HasField("grammar"):
            task = compiling.create_task(self._submit_compiled(request, submit.generation.grammar))
            self._compiling[key] = task
            task.add_done_callback(lambda ended: self._compiled(key, ended))
        else:
            self.engine.submit(request)

    async def _submit_compiled(self, request: Request, grammar: pb.Grammar) -> None:
        """Compile a grammar beside everything else; a cancelled request gives up its place."""
        try:
            compiled = await compile_grammar(self._compiler, grammar, request)
        except Exception as failure:  # of this request alone: others share its stream
            error = failure
            if not isinstance(error, MoesaicError):
                log.exception("grammar.failed", **named([request]))
                error = MoesaicError("the grammar was not compiled; see the worker's log")
            if request.key in self._open:
                self._close(request.key)
                self._refuse(request.key, error)
            return
        if request.key in self._open and self.engine is not None:
            # Only these have grammars.
            assert isinstance(request.task, GenerationTask)
            task = dataclasses.replace(request.task, grammar=compiled)
            self.engine.submit(dataclasses.replace(request, task=task))

    def _compiled(self, key: RequestKey, ended: asyncio.Task[None]) -> None:
        # Else the same request has come again.
        if self._compiling[key] is ended:
            del self._compiling[key]

    def _refuse(self, key: RequestKey, error: MoesaicError) -> None:
        self.streams.send(key.stream, encode_event(FailureEvent(key, error)))

    def _close(self, key: RequestKey) -> None:
        self._open.discard(key)
        if not self._open:
            self.idle.set()

    def _cancel(self, key: RequestKey) -> None:
        self._close(key)
        if compiling := self._compiling.get(key):
            # Its grammar need not be compiled for it.
            compiling.cancel()
        if self.engine is not None:
            self.engine.cancel(key)

    def _cancel_all_of(self, stream: int) -> None:
        for key in [key for key in self._open if key.stream == stream]:
            self._cancel(key)
