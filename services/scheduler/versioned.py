"""Orders of operators and of the scheduler in Redis; they survive schedulers and losses of data."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import NotReady, PeerLost
from moesaic.messages.order import Order
from moesaic.services.scheduler.epochs.store import EpochStore

log = structlog.get_logger()

PLACEMENT, SCALING = "placement:policy", "scaling:policy"
_LOOK_S = 5.0  # four documents: less than one read a second together

_T = TypeVar("_T", bound=Order)


class VersionedStore(Generic[_T]):
    """One document: the policy of placement with its pins, of scaling, of brownout, or the last scaling action.

    ================================  ==========================  ==============================
    known to this scheduler or Redis  in force for the leader     in force for another scheduler
    ================================  ==========================  ==============================
    an order (version 1 or more)      the order of the highest    the same
                                      version; Redis's of two
    no order, a document in Redis     its own setting             the document in Redis
    no order, nothing readable        the document known last     the same
    ================================  ==========================  ==============================

    The leader writes what is in force unless Redis holds it. Schedulers that wait read it every few seconds. They write
    an order of theirs if Redis has none or an earlier one, for the leader may not know it. So a Redis that lost the
    document, or went back to an earlier one, gets it from any scheduler that holds it, and no setting replaces an order
    for long.

    Versions are times. If Redis and its leader lose an order together, the next one still has a later version, so the
    lost one, which some scheduler may hold, does not replace it.

    Attributes:
        current: the document in force.
    """

    def __init__(
        self,
        bus: Bus,
        epochs: EpochStore,
        leadership: Leadership,
        key: str,
        setting: _T,
        tell: Callable[[_T], Awaitable[object]] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``setting``: that this process was started with. ``tell``: gives readers a hint after a change."""
        self._bus, self._epochs, self._leadership = bus, epochs, leadership
        self._key, self._wall_clock = key, wall_clock
        self._tell: Callable[[_T], Awaitable[object]] | None = tell
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(type(setting))
        self._setting: _T = setting
        self.current: _T = setting
        self._turn = asyncio.Lock()  # between reading and writing no other task changes it

    async def look(self) -> None:
        """Take the document from Redis, leading or not; without Redis, what is known stays."""
        with suppress(PeerLost):
            async with self._turn:
                await self._read()

    async def keep(self) -> None:
        """Take the document from Redis, and write the one in force unless Redis has it.

        A scheduler that waits writes orders only.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            found, stored = await self._read()
            if stored == self.current:
                return
            if self._leadership.held:
                await self._write(found, self.current)
            elif self.current.version:
                # Without the fence of a leader: readers take the later version, whoever wrote it.
                sealed = self._bus.sealed(self._key, self.current)
                if not await self._bus.compare_and_set({self._key: found}, {self._key: sealed}):
                    return
            if self.current.version:
                log.warning("order.restored", name=self._key, version=self.current.version)

    async def run(self) -> None:
        """Look every few seconds, and keep the document in Redis while this scheduler leads, for ever."""
        while True:
            with suppress(NotReady, PeerLost):
                await self.keep()
            await asyncio.sleep(_LOOK_S)

    async def change(self, edit: Callable[[_T], _T]) -> _T:
        """Replace the document by the result of ``edit``, as an order of a later version.

        An order that changes nothing about an earlier order keeps its version.

        Returns:
            The new document.

        Raises:
            InvalidInput: ``edit`` refuses; nothing has changed.
            NotReady: another scheduler leads now, or wrote at the same time.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            found, _ = await self._read()
            before, edited = self.current, edit(self.current)
            if before.version and replace(edited, version=before.version) == before:
                return before
            version = max(before.version + 1, int(self._wall_clock()))
            after = replace(edited, version=version)
            await self._write(found, after)
            log.info("order.set", name=self._key, **msgspec.to_builtins(after))
            return after

    async def _read(self) -> tuple[bytes | None, _T | None]:
        found = await self._bus.get_content(self._key, self._decoder)
        stored, known = found.message, self.current
        if stored is not None:
            if not stored.version and not known.version:
                self.current = self._setting if self._leadership.held else stored
            elif stored.version >= known.version:
                self.current = stored
        return found.value, stored

    async def _write(self, found: bytes | None, document: _T) -> None:
        sealed = self._bus.sealed(self._key, document)
        await self._epochs.write({self._key: found}, {self._key: sealed})
        self.current = document
        if self._tell is not None:
            # Readers also look by themselves.
            with suppress(PeerLost):
                await self._tell(document)
