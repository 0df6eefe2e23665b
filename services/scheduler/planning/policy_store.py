"""The policy and the pins that operators have set, in Redis: they outlive every scheduler."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.decisions import PlacementPolicy
from moesaic.services.scheduler.epochs.store import EpochStore

log = structlog.get_logger()

_KEY = "placement:policy"
_policies = msgspec.msgpack.Decoder(PlacementPolicy)


class PolicyStore:
    """Reads the policy, and writes it if this scheduler leads.

    Attributes:
        current: the policy that operators have set, else the one this process was started with.
    """

    def __init__(self, bus: Bus, epochs: EpochStore, default: str) -> None:
        self._bus, self._epochs = bus, epochs
        self.current = PlacementPolicy(policy=default)
        self._stored = False
        self._turn = asyncio.Lock()  # between reading and writing no other task changes it

    async def look(self) -> None:
        """Take the policy from Redis, leading or not; without Redis, what is known stays."""
        with suppress(PeerLost):
            async with self._turn:
                await self._read()

    async def refresh(self) -> None:
        """Take the policy from Redis, or restore it there if Redis has lost it.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            before = await self._read()
            if before is None and self._stored:
                await self._write(before, self.current)

    async def change(self, edit: Callable[[PlacementPolicy], PlacementPolicy]) -> PlacementPolicy:
        """Replace the policy by what ``edit`` makes of the one in force.

        Returns:
            The new policy.

        Raises:
            NotReady: another scheduler leads now, or wrote at the same time.
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            before = await self._read()
            after = edit(self.current)
            if after != self.current:
                await self._write(before, after)
                log.info("policy.set", policy=after.policy, pins=len(after.pins))
            return after

    async def _read(self) -> bytes | None:
        found = await self._bus.get_bytes(_KEY)
        policy = self._bus.opened(_KEY, found, _policies)
        if policy is not None:
            self.current, self._stored = policy, True
        return found

    async def _write(self, before: bytes | None, policy: PlacementPolicy) -> None:
        await self._epochs.write({_KEY: before}, {_KEY: self._bus.sealed(_KEY, policy)})
        self.current, self._stored = policy, True
