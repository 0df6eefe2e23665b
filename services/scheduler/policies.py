"""The policy that operators have set, in Redis: it outlives every scheduler."""

import msgspec
import structlog

from moesaic.cluster.bus import Bus, encode
from moesaic.messages.decisions import PlacementPolicy
from services.scheduler.epochs import EpochStore

log = structlog.get_logger()

_KEY = "placement:policy"
_policies = msgspec.msgpack.Decoder(PlacementPolicy)


class PolicyStore:
    """Reads the policy, and writes it if this scheduler leads.

    Attributes:
        current: what operators have set, else what this process was told at its start.
    """

    def __init__(self, bus: Bus, epochs: EpochStore, default: str) -> None:
        self._bus, self._epochs = bus, epochs
        self.current = PlacementPolicy(policy=default)
        self._stored = False

    async def refresh(self) -> None:
        """Take what Redis has; give a Redis that lost it what we remember.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        found = await self._bus.get(_KEY, _policies)
        if found is not None:
            self.current, self._stored = found, True
        elif self._stored:
            await self.set(self.current)

    async def set(self, policy: PlacementPolicy) -> None:
        """Make this the policy.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        await self._epochs.write({_KEY: await self._bus.get_bytes(_KEY)}, {_KEY: encode(policy)})
        self.current, self._stored = policy, True
        log.info("policy.set", policy=policy.policy, pins=len(policy.pins))
