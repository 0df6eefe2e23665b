"""A policy that operators set, in Redis: it outlives every scheduler."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import structlog
from msgspec.structs import asdict, replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import NotReady, PeerLost
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.decisions import PlacementPolicy
from moesaic.messages.scaling import ScalingPolicy
from moesaic.services.scheduler.epochs.store import EpochStore

log = structlog.get_logger()

PLACEMENT, SCALING = "placement:policy", "scaling:policy"
_LOOK_S = 1.0

_Policy = TypeVar("_Policy", PlacementPolicy, ScalingPolicy, BrownoutPolicy)


class StoredPolicy(Generic[_Policy]):
    """Reads a policy, and writes it if this scheduler leads.

    ======================  =================================  =================================
    Redis holds             in force for the leader            in force for another scheduler
    ======================  =================================  =================================
    an order of operators   that order                         that order
    a setting of a start    its own setting, which it writes   that setting
    nothing readable        the last one known, it writes it   the last one known
    ======================  =================================  =================================

    Attributes:
        current: the policy in force.
    """

    def __init__(
        self,
        bus: Bus,
        epochs: EpochStore,
        leadership: Leadership,
        key: str,
        setting: _Policy,
        tell: Callable[[_Policy], Awaitable[object]] | None = None,
    ) -> None:
        """``setting``: that this process was started with. ``tell``: gives readers a hint after a change."""
        self._bus, self._epochs, self._leadership = bus, epochs, leadership
        self._key = key
        self._tell: Callable[[_Policy], Awaitable[object]] | None = tell
        self._policies: msgspec.msgpack.Decoder[_Policy] = msgspec.msgpack.Decoder(type(setting))
        self._setting: _Policy = setting
        self.current: _Policy = setting
        self._turn = asyncio.Lock()  # between reading and writing no other task changes it

    async def look(self) -> None:
        """Take the policy from Redis, leading or not; without Redis, what is known stays."""
        with suppress(PeerLost):
            async with self._turn:
                await self._read()

    async def keep(self) -> None:
        """Take the policy from Redis; a leader writes the one in force unless Redis has it.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            found, stored = await self._read()
            if self._leadership.held and stored != self.current:
                await self._write(found, self.current)

    async def run(self) -> None:
        """Keep the policy in Redis while this scheduler leads, for ever."""
        while True:
            if self._leadership.held:
                with suppress(NotReady, PeerLost):
                    await self.keep()
            await asyncio.sleep(_LOOK_S)

    async def change(self, edit: Callable[[_Policy], _Policy]) -> _Policy:
        """Replace the policy by what ``edit`` makes of the one in force, as an order of operators.

        Returns:
            The new policy.

        Raises:
            InvalidInput: ``edit`` refuses; nothing has changed.
            NotReady: another scheduler leads now, or wrote at the same time.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            found, _ = await self._read()
            after = replace(edit(self.current), source="operator")
            if after != self.current:
                await self._write(found, after)
                log.info("policy.set", name=self._key, **asdict(after))
            return after

    async def _read(self) -> tuple[bytes | None, _Policy | None]:
        found = await self._bus.get_stored(self._key, self._policies)
        stored = found.message
        if stored is not None:
            binds = stored.source == "operator" or not self._leadership.held
            self.current = stored if binds else self._setting
        return found.value, stored

    async def _write(self, found: bytes | None, policy: _Policy) -> None:
        sealed = self._bus.sealed(self._key, policy)
        await self._epochs.write({self._key: found}, {self._key: sealed})
        self.current = policy
        if self._tell is not None:
            with suppress(PeerLost):  # readers also look by themselves
                await self._tell(policy)
