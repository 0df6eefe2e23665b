"""The serving end of a connection: passes requests to the handler, and sends its replies and errors."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

import structlog

from moesaic.errors import FrameError, MoesaicError, Overloaded
from moesaic.telemetry.shortage import ran_out_of_memory, short_of_memory
from moesaic.transport.contract import Handler
from moesaic.transport.device_memory import settle
from moesaic.transport.failure import failure_frame
from moesaic.transport.frame import Frame, FrameKind, FrameLimits, Message
from moesaic.transport.wire import Wire, receive_frame, send_frame

log = structlog.get_logger()

MAX_CONCURRENT = 256  # requests of one peer that are being served
FEWER_EXPERTS = "lower --slots-per-layer of this worker"


class ServedLink:
    """Serves one authenticated peer until either side ends the connection.

    Attributes:
        peer: worker id of the peer, proved by the handshake.
    """

    def __init__(
        self,
        peer: str,
        wire: Wire,
        handler: Handler,
        limits: FrameLimits,
        on_end: "Callable[[ServedLink], None]",
    ) -> None:
        self.peer, self._wire, self._handler, self._limits = peer, wire, handler, limits
        self._on_end = on_end
        self._alive = True
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, message: Message) -> None:
        """Start serving a request or a note, or answer a ping; anything else ends the connection."""
        try:
            receive_frame(self._wire, message, self._limits, self._take)
        except FrameError as error:
            self._refuse(error)

    def _take(self, frame: Frame) -> None:
        try:
            if frame.kind is FrameKind.PING:
                self._wire.send(Frame(kind=FrameKind.PONG, seq=frame.seq).encode())
            elif frame.kind not in (FrameKind.REQUEST, FrameKind.NOTE):
                raise FrameError("kind", f"expected a request, got {frame.kind.name}")
            elif len(self._tasks) >= MAX_CONCURRENT:
                busy = Overloaded(f"{MAX_CONCURRENT} requests of this peer are being served", 0.1)
                if frame.kind is FrameKind.REQUEST:
                    self._wire.send(failure_frame(frame, busy).encode())
            else:
                self._serve(frame)
        except FrameError as error:
            self._refuse(error)

    def _refuse(self, error: FrameError) -> None:
        log.warning("frame.refused", peer=self.peer, cause=str(error))
        self.end()

    def on_lost(self, cause: str) -> None:
        """See ``Receiver.on_lost``."""
        log.info("peer.left", peer=self.peer, cause=cause)
        self.end()

    def end(self) -> None:
        """Close the connection and cancel its handlers."""
        if self._alive:
            self._alive = False
            self._wire.close()
            for task in self._tasks:
                task.cancel()
            self._on_end(self)

    async def ended(self) -> None:
        """Wait for the handlers that ``end`` has cancelled."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, request: Frame) -> None:
        try:
            reply = self._handler(request)
        except Exception as error:
            self._send_failure(request, error)
            return
        if isinstance(reply, Frame):
            self._send(request, reply)
            return
        task = asyncio.ensure_future(self._serve_later(request, reply))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, reply))

    def _forget(self, reply: Awaitable[Frame], task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() and isinstance(reply, Coroutine):
            # Cancelled before its first step, it would never be awaited.
            reply.close()

    async def _serve_later(self, request: Frame, reply: Awaitable[Frame]) -> None:
        try:
            self._send(request, await reply)
        except Exception as error:
            self._send_failure(request, error)

    def _send(self, request: Frame, reply: Frame) -> None:
        if request.kind is not FrameKind.REQUEST or not self._alive:
            return
        try:
            carrier = self._wire.parcels
            if carrier is not None and reply.parcels and not reply.settled:
                settle(carrier.memory.device)
            send_frame(self._wire, reply)
        except MoesaicError as error:
            self._wire.send(failure_frame(request, error).encode())

    def _send_failure(self, request: Frame, error: Exception) -> None:
        if not isinstance(error, MoesaicError):
            log.error(
                "request.failed",
                peer=self.peer,
                layer=request.layer,
                epoch=request.epoch,
                exc_info=error,
            )
            error = (
                short_of_memory(error, f"layer {request.layer} of a step", FEWER_EXPERTS)
                if ran_out_of_memory(error)
                else MoesaicError("the worker failed; see its log")
            )
        if self._alive and request.kind is FrameKind.REQUEST:
            self._wire.send(failure_frame(request, error).encode())
