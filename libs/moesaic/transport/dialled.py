"""The dialling end of a connection: sends requests, matches replies to them, and checks the peer's pulse."""

import asyncio
import itertools
from collections.abc import Callable

import structlog

from moesaic.errors import DeadlineExceeded, FrameError, InvalidInput, MoesaicError, PeerLost
from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.failure import error_of
from moesaic.transport.frame import Frame, FrameKind, FrameLimits, Message
from moesaic.transport.pulse import Pulse, Verdict
from moesaic.transport.rings.channel import Channel
from moesaic.transport.wire import Wire, receive_frame, send_frame

log = structlog.get_logger()

Settle = Callable[[Frame | MoesaicError], None]
"""Takes the outcome of a call: its reply, or the error that stands for one."""


class DialledLink:
    """A ``Link`` over a wire. Any number of calls may be outstanding; ``seq`` tells them apart."""

    def __init__(self, peer: str, wire: Wire, limits: FrameLimits) -> None:
        self._peer, self._wire, self._limits = peer, wire, limits
        self._alive = True
        self._outstanding: dict[int, tuple[Frame, Settle]] = {}  # by seq
        self._pulse = Pulse(asyncio.get_running_loop().time())
        self._ping_seq = itertools.count(1)
        self._first_pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._probes: dict[int, asyncio.Future[None]] = {}  # by the seq of their pings

    @property
    def peer(self) -> str:
        """See ``Link.peer``."""
        return self._peer

    @property
    def channel(self) -> Channel | None:
        """See ``Link.channel``."""
        return self._wire.channel

    @property
    def memory(self) -> DeviceMemory | None:
        """See ``Link.memory``."""
        carrier = self._wire.parcels
        return None if carrier is None else carrier.memory

    @property
    def alive(self) -> bool:
        """See ``Link.alive``."""
        return self._alive

    def discard(self, cause: str) -> None:
        """See ``Link.discard``."""
        self._end(PeerLost(self._peer, cause))

    async def answered(self) -> None:
        """Ping once and wait for the answer: messages can flow both ways. Cancelling it discards the link.

        Raises:
            PeerLost: the link ended first.
        """
        self._ping()
        try:
            await self._first_pong
        except asyncio.CancelledError:
            self.discard("the dial was given up")
            raise

    def post(self, frame: Frame) -> None:
        """See ``Link.post``."""
        if not self._alive:
            raise PeerLost(self._peer, "the link is closed")
        self._wire.send(frame.encode())

    async def probe(self, nbytes: int, deadline_s: float) -> float:
        """See ``Link.probe``."""
        if not self._alive:
            raise PeerLost(self._peer, "the link is closed")
        loop = asyncio.get_running_loop()
        seq, answered = next(self._ping_seq), loop.create_future()
        self._probes[seq] = answered
        started = loop.time()
        self._wire.send(Frame(kind=FrameKind.PING, seq=seq, body=bytes(nbytes)).encode())
        try:
            async with asyncio.timeout(deadline_s):
                await answered
        except TimeoutError:
            raise DeadlineExceeded(f"a probe of {self._peer}", deadline_s * 1e3) from None
        finally:
            self._probes.pop(seq, None)
        return loop.time() - started

    def call(self, frame: Frame, settle: Settle) -> None:
        """Send a request; ``settle`` gets its outcome, once."""
        if not self._alive:
            settle(PeerLost(self._peer, "the link is closed"))
            return
        if frame.seq in self._outstanding:
            settle(InvalidInput("seq", f"{frame.seq} is outstanding on this link already"))
            return
        self._outstanding[frame.seq] = (frame, settle)
        try:
            send_frame(self._wire, frame)
        except InvalidInput as error:
            del self._outstanding[frame.seq]
            settle(error)

    def beat(self, now: float) -> None:
        """Act on the peer's pulse; called once per interval."""
        # Calls by C functions are outstanding as well, though not here.
        busy = bool(self._outstanding) or (
            self.channel is not None and self.channel.outstanding > 0
        )
        verdict = self._pulse.check(now, busy=busy)
        if verdict is Verdict.EJECT:
            self.discard("no heartbeat")
        elif not busy:
            if verdict is Verdict.WARN:
                log.warning("link.suspected", peer=self._peer)
            self._ping()

    def on_lost(self, cause: str) -> None:
        """See ``Receiver.on_lost``."""
        self.discard(cause)

    def on_message(self, message: Message) -> None:
        """Match an answer to its call; anything but an expected answer ends the link."""
        self._pulse.heard(asyncio.get_running_loop().time())
        try:
            receive_frame(self._wire, message, self._limits, self._take)
        except FrameError as error:
            self._end(error)

    def _take(self, frame: Frame) -> None:
        try:
            if frame.kind is FrameKind.PONG:
                for waiting in (self._first_pong, self._probes.get(frame.seq)):
                    if waiting is not None and not waiting.done():
                        waiting.set_result(None)
                return
            settle = self._match(frame)
            outcome = error_of(frame) if frame.kind is FrameKind.ERROR else frame
        except FrameError as error:
            self._end(error)
            return
        del self._outstanding[frame.seq]
        settle(outcome)

    def _match(self, frame: Frame) -> Settle:
        if frame.kind not in (FrameKind.REPLY, FrameKind.ERROR):
            raise FrameError("kind", f"expected an answer, got {frame.kind.name}")
        if frame.seq not in self._outstanding:
            raise FrameError("seq", f"{frame.seq} answers nothing that is outstanding")
        request, settle = self._outstanding[frame.seq]
        if foreign := frame.answers(request):
            raise FrameError(foreign, "answers another request")
        return settle

    def _ping(self) -> None:
        self._wire.send(Frame(kind=FrameKind.PING, seq=next(self._ping_seq)).encode())

    def _end(self, error: MoesaicError) -> None:
        if not self._alive:
            return
        self._alive = False
        self._wire.close()
        log.info(
            "link.discarded", peer=self._peer, cause=str(error), outstanding=len(self._outstanding)
        )
        if not self._first_pong.done():
            self._first_pong.set_exception(error)
            # Nobody may be waiting.
            self._first_pong.exception()
        for probe in self._probes.values():
            if not probe.done():
                probe.set_exception(error)
        for _, settle in self._outstanding.values():
            settle(error)
        self._outstanding.clear()
