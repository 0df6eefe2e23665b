"""The policy of brownout, which outlives every scheduler, and the decisions of workers under it."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

import msgspec
import structlog
from msgspec.structs import replace

from moesaic.cluster.brownout_view import DECISIONS, POLICY, STREAM, policies
from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import NotReady, PeerLost
from moesaic.messages.brownout import BrownoutDecision, BrownoutHint, BrownoutPolicy
from moesaic.messages.rung import Rung
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.log import DecisionLog

log = structlog.get_logger()

_LOOK_S = 1.0
_decisions = msgspec.msgpack.Decoder(BrownoutDecision)


class BrownoutStore:
    """Reads the policy, and writes it if this scheduler leads.

    Attributes:
        current: the policy that operators have set, else the one this process was started with.
    """

    def __init__(
        self, bus: Bus, epochs: EpochStore, leadership: Leadership, default: BrownoutPolicy
    ) -> None:
        self._bus, self._epochs, self._leadership = bus, epochs, leadership
        self.current = self._default = default
        self._turn = asyncio.Lock()  # between reading and writing no other task changes it

    def rung(self) -> Rung:
        """The way to degrade under the policy."""
        return self.current.rung

    async def look(self) -> None:
        """Take the policy from Redis, leading or not; without Redis, what is known stays."""
        with suppress(PeerLost):
            async with self._turn:
                await self._read()

    async def run(self) -> None:
        """Keep the policy in Redis while this scheduler leads, for ever: workers read it there."""
        while True:
            if self._leadership.held:
                with suppress(NotReady, PeerLost):
                    async with self._turn:
                        found = await self._read()
                        if (
                            found is None
                            or self._bus.opened(POLICY, found, policies) != self.current
                        ):
                            await self._write(found, self.current)
            await asyncio.sleep(_LOOK_S)

    async def change(self, edit: Callable[[BrownoutPolicy], BrownoutPolicy]) -> BrownoutPolicy:
        """Replace the policy by what ``edit`` makes of the one in force.

        Returns:
            The new policy.

        Raises:
            InvalidInput: the new policy makes no sense; nothing has changed.
            NotReady: another scheduler leads now, or wrote at the same time.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            before = await self._read()
            after = replace(edit(self.current), source="operator").checked()
            if after != self.current:
                await self._write(before, after)
                log.info("brownout.set", mode=after.mode, way=after.way, rule=after.rule)
            return after

    async def _read(self) -> bytes | None:
        found = await self._bus.get_bytes(POLICY)
        policy = self._bus.opened(POLICY, found, policies)
        if policy is not None:
            # What another start was told by its setting does not bind a leader.
            binds = policy.source == "operator" or not self._leadership.held
            self.current = policy if binds else self._default
        return found

    async def _write(self, before: bytes | None, policy: BrownoutPolicy) -> None:
        await self._epochs.write({POLICY: before}, {POLICY: self._bus.sealed(POLICY, policy)})
        self.current = policy
        with suppress(PeerLost):  # workers also look by themselves
            await self._bus.append(STREAM, BrownoutHint(mode=policy.mode))


class BrownoutFeed:
    """Takes the decisions of workers into the log of decisions, while its scheduler leads."""

    def __init__(self, bus: Bus, leadership: Leadership, decisions: DecisionLog) -> None:
        self._bus, self._leadership, self._log = bus, leadership, decisions

    async def run(self) -> None:
        """Take in every decision while this scheduler leads, for ever.

        A new leader begins with those of the last hour, which Redis has.
        """
        while True:
            if self._leadership.held:
                await self._log.refresh()  # not to log again what the leader before has logged
                read = self._bus.read_on(DECISIONS, _decisions)
                async with aclosing(read) as decisions:
                    async for decision in decisions:
                        if decision is not None:
                            await self._log.note_brownout(decision)
                        if not self._leadership.held:
                            break
            await asyncio.sleep(_LOOK_S)
