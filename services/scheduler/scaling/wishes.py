"""The wish for a shape, which outlives every scheduler."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.documents import Stored
from moesaic.errors import NotReady, PeerLost
from moesaic.messages.scaling import FleetShape, ScalingWish
from moesaic.services.scheduler.epochs.store import EpochStore

WISH = "scaling:wish"
OVERTAKEN = "another shape was wanted before it was there"

_wishes = msgspec.msgpack.Decoder(ScalingWish)


class WishStore:
    """Reads the wish, and writes it if this scheduler leads.

    Attributes:
        wish: the last action, if there was one.
    """

    def __init__(
        self,
        bus: Bus,
        epochs: EpochStore,
        leadership: Leadership,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._epochs, self._leadership = bus, epochs, leadership
        self.wish: ScalingWish | None = None
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()  # between reading and writing no other task changes it

    async def look(self) -> None:
        """Take the wish from Redis, leading or not; without Redis, what is known stays."""
        with suppress(PeerLost):
            async with self._turn:
                await self._read()

    async def refresh(self) -> None:
        """Take the wish from Redis; a leader puts it back where Redis has lost it.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            found = await self._read()
            if found.message is None and self.wish is not None and self._leadership.held:
                await self._write(found.value, self.wish)

    async def want(
        self, shape: FleetShape, before: FleetShape, decision_id: str
    ) -> ScalingWish | None:
        """Make ``shape`` the wish in force, one number after the last.

        Args:
            shape: that is wanted.
            before: the shape that there is.
            decision_id: of the decision behind it.

        Returns:
            The wish that it overtakes, if there was one that had not ended.

        Raises:
            NotReady: another scheduler leads now, or wrote at the same time; nothing has changed.
            PeerLost: Redis did not answer, and the outcome is unknown.
        """
        async with self._turn:
            stored = (await self._read()).value
            last = self.wish
            wish = ScalingWish(
                number=last.number + 1 if last else 1,
                shape=shape,
                decision_id=decision_id,
                at=self._wall_clock(),
                up=_direction(before, shape),
            )
            await self._write(stored, wish)
            return None if last is None or last.ended else last

    async def end(self, seconds: float | None = None, failure: str = "") -> ScalingWish:
        """Note how the wish in force ended, once.

        Args:
            seconds: until its shape was there.
            failure: why it was given up.

        Returns:
            The wish with its end.

        Raises:
            NotReady: another scheduler leads now, or there is another wish.
            PeerLost: Redis did not answer, and the outcome is unknown.
        """
        async with self._turn:
            wish = self.wish
            stored = (await self._read()).value
            if wish is None or self.wish != wish:
                raise NotReady("another shape is wanted now")
            ended = replace(wish, seconds=seconds, failure=failure)
            await self._write(stored, ended)
            return ended

    async def _read(self) -> Stored[ScalingWish]:
        found = await self._bus.get_stored(WISH, _wishes)
        if found.message is not None:
            self.wish = found.message
        return found

    async def _write(self, stored: bytes | None, wish: ScalingWish) -> None:
        await self._epochs.write({WISH: stored}, {WISH: self._bus.sealed(WISH, wish)})
        self.wish = wish


def _direction(before: FleetShape, after: FleetShape) -> bool | None:
    """True if workers are added, False if some are only taken away, None for neither."""
    if after.attention > before.attention or after.experts > before.experts:
        return True
    return None if after == before else False
