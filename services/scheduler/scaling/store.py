"""The policy of scaling and the wish in force, which outlive every scheduler."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import NotReady, PeerLost
from moesaic.messages.scaling import FleetShape, ScalingHint, ScalingPolicy, ScalingWish
from moesaic.services.scheduler.epochs.store import EpochStore

log = structlog.get_logger()

STREAM = "ctl:scaling"  # hints that one of the two has changed
POLICY, WISH = "scaling:policy", "scaling:wish"
OVERTAKEN = "another shape was wanted before it was there"

_policies = msgspec.msgpack.Decoder(ScalingPolicy)
_wishes = msgspec.msgpack.Decoder(ScalingWish)


class ScalingStore:
    """Reads both, and writes them if this scheduler leads.

    Attributes:
        policy: that operators have set, else the one this process was started with.
        wish: the last action, if there was one.
    """

    def __init__(
        self,
        bus: Bus,
        epochs: EpochStore,
        leadership: Leadership,
        default: ScalingPolicy,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._epochs, self._leadership = bus, epochs, leadership
        self.policy = default
        self.wish: ScalingWish | None = None
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()  # between reading and writing no other task changes them

    async def look(self) -> None:
        """Take both from Redis, leading or not; without Redis, what is known stays."""
        with suppress(PeerLost):
            await self.refresh()

    async def refresh(self) -> None:
        """Take both from Redis; a leader puts back what Redis has lost.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            policy, wish = await self._read_policy(), await self._read_wish()
            if not self._leadership.held:
                return
            if policy is None and self.policy.source == "operator":
                await self._write_policy(None, self.policy)
            if wish is None and self.wish is not None:
                await self._write_wish(None, self.wish)

    async def change(self, edit: Callable[[ScalingPolicy], ScalingPolicy]) -> ScalingPolicy:
        """Replace the policy by what ``edit`` makes of the one in force.

        Returns:
            The new policy.

        Raises:
            InvalidInput: the new policy makes no sense; nothing has changed.
            NotReady: another scheduler leads now, or wrote at the same time.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            before = await self._read_policy()
            after = replace(edit(self.policy), source="operator").checked()
            if after != self.policy:
                await self._write_policy(before, after)
                log.info("scaling.set", mode=after.mode)
            return after

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
            stored = await self._read_wish()
            last = self.wish
            wish = ScalingWish(
                number=last.number + 1 if last else 1,
                shape=shape,
                decision_id=decision_id,
                at=self._wall_clock(),
                up=_direction(before, shape),
            )
            await self._write_wish(stored, wish)
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
            stored = await self._read_wish()
            if wish is None or self.wish != wish:
                raise NotReady("another shape is wanted now")
            ended = replace(wish, seconds=seconds, failure=failure)
            await self._write_wish(stored, ended)
            return ended

    async def _read_policy(self) -> bytes | None:
        found = await self._bus.get_bytes(POLICY)
        policy = self._bus.opened(POLICY, found, _policies)
        if policy is not None:
            self.policy = policy
        return found

    async def _read_wish(self) -> bytes | None:
        found = await self._bus.get_bytes(WISH)
        wish = self._bus.opened(WISH, found, _wishes)
        if wish is not None:
            self.wish = wish
        return found

    async def _write_policy(self, stored: bytes | None, policy: ScalingPolicy) -> None:
        await self._epochs.write({POLICY: stored}, {POLICY: self._bus.sealed(POLICY, policy)})
        self.policy = policy
        await self._hint()

    async def _write_wish(self, stored: bytes | None, wish: ScalingWish) -> None:
        await self._epochs.write({WISH: stored}, {WISH: self._bus.sealed(WISH, wish)})
        self.wish = wish
        await self._hint()

    async def _hint(self) -> None:
        with suppress(PeerLost):  # readers also look by themselves
            number = self.wish.number if self.wish else 0
            await self._bus.append(STREAM, ScalingHint(number=number))


def _direction(before: FleetShape, after: FleetShape) -> bool | None:
    """True if workers are added, False if some are only taken away, None for neither."""
    if after.attention > before.attention or after.experts > before.experts:
        return True
    return None if after == before else False
