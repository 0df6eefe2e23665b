"""The door of a listener: peers with the cluster secret never wait behind strangers.

A connection begins as a stranger. A HELLO that is sealed with the secret makes it a guest; the rest of
the handshake proves that the seal was no copy. Strangers and guests have a bounded number of places
each, and a newcomer takes the place of the one that is there longest. So a crowd of strangers pushes
out only itself: a peer that dials and speaks at once is a guest before its turn to go comes.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from prometheus_client import Counter

from moesaic.errors import MoesaicError

log = structlog.get_logger()

DROPPED = Counter(
    "moesaic_transport_strangers_dropped",
    "Connections dropped because they did not prove the cluster secret",
)

SPEAK_S = 1.0  # for a stranger to say its first byte
HANDSHAKE_S = 2.0  # from then on, to prove itself
MAX_STRANGERS = 256
MAX_GUESTS = 256
BACKLOG = 1024  # connections that wait in the kernel while the event loop computes
_AT_A_TIME = 16  # connections taken in one turn of the event loop
_PAUSE_S = 1.0  # after the kernel refused one and there was no stranger to drop
_LOG_EVERY_S = 1.0

Admit = Callable[[socket.socket, Callable[[], None]], Awaitable[None]]
"""Carries out the handshake on a connection, calls back once its HELLO proves sealed, and keeps the
socket if it returns. It raises ``MoesaicError`` or ``OSError`` if the handshake fails."""


class Door:
    """Accepts connections and gives each a short while to prove itself."""

    def __init__(self, listener: socket.socket, admit: Admit, full: Callable[[], bool]) -> None:
        """Open a bound, non-blocking ``listener``; while ``full`` is true, no peer is admitted."""
        self._listener, self._admit, self._full = listener, admit, full
        self._loop = asyncio.get_running_loop()
        # In order of arrival: the timer of the first byte, or the handshake.
        self._strangers: dict[socket.socket, asyncio.TimerHandle | asyncio.Task[bool]] = {}
        self._guests: dict[socket.socket, asyncio.Task[bool]] = {}
        self._tasks: set[asyncio.Task[bool]] = set()
        self._reopening: asyncio.TimerHandle | None = None
        self._num_unlogged, self._logged_at = 0, -_LOG_EVERY_S
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        """Stop accepting, and drop all strangers and guests."""
        if self._reopening is not None:
            self._reopening.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for sock in [*self._strangers, *self._guests]:
            self._drop(sock, "the listener is closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        # Then those that were here before are heard.
        for _ in range(_AT_A_TIME):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._make_room(error)
                return
            if self._full():
                sock.close()
                self._count("as many peers are served as may be")
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                self._drop(next(iter(self._strangers)), "others came")
            sock.setblocking(False)
            self._strangers[sock] = self._loop.call_later(
                SPEAK_S, self._drop, sock, f"said nothing within {SPEAK_S} s"
            )
            self._loop.add_reader(sock, self._heard, sock)

    def _make_room(self, error: OSError) -> None:
        """Free a file descriptor: a stranger's, else wait until some are closed."""
        if self._strangers:
            self._drop(next(iter(self._strangers)), f"no room: {error.strerror}")
            return
        log.warning("accept.failed", cause=str(error))
        self._loop.remove_reader(self._listener)
        self._reopening = self._loop.call_later(
            _PAUSE_S, self._loop.add_reader, self._listener, self._accept
        )

    def _heard(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        self._strangers[sock].cancel()
        task = self._loop.create_task(self._shake_hands(sock))
        self._strangers[sock] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._shaken, sock))

    async def _shake_hands(self, sock: socket.socket) -> bool:
        """Carry out the handshake; True if the peer was admitted."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._admit(sock, partial(self._vouch, sock))
        except TimeoutError:
            self._count(f"did not prove itself within {HANDSHAKE_S} s")
        except (MoesaicError, OSError) as error:
            self._count(str(error))
        else:
            return True
        return False

    def _shaken(self, sock: socket.socket, task: "asyncio.Task[bool]") -> None:
        self._tasks.discard(task)
        self._strangers.pop(sock, None)
        self._guests.pop(sock, None)
        if task.cancelled():
            sock.close()
        elif (error := task.exception()) is not None:
            log.error("handshake.failed", exc_info=error)
            sock.close()
        elif not task.result():
            sock.close()

    def _vouch(self, sock: socket.socket) -> None:
        """Let a stranger become a guest."""
        task = self._strangers.pop(sock, None)
        if not isinstance(task, asyncio.Task):
            # It was dropped
            return
        if len(self._guests) >= MAX_GUESTS:
            self._drop(next(iter(self._guests)), "other guests came")
        self._guests[sock] = task

    def _drop(self, sock: socket.socket, cause: str) -> None:
        waiting = self._strangers.pop(sock, None) or self._guests.pop(sock)
        waiting.cancel()
        # Else its task closes it.
        if isinstance(waiting, asyncio.TimerHandle):
            self._loop.remove_reader(sock)
            sock.close()
        self._count(cause)

    def _count(self, cause: str) -> None:
        """Count a dropped connection, and log at most a line a second."""
        DROPPED.inc()
        self._num_unlogged += 1
        now = self._loop.time()
        if now - self._logged_at >= _LOG_EVERY_S:
            log.info("stranger.dropped", cause=cause, dropped=self._num_unlogged)
            self._num_unlogged, self._logged_at = 0, now
