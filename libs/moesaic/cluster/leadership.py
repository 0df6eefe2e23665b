"""One leader at a time, others ready to take over."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import structlog
from prometheus_client import Gauge

from moesaic.cluster.background import tended
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost

log = structlog.get_logger()

LEASE_S = 10
RENEW_S = 3.0
_leads = Gauge("moesaic_leader", "1 while this process leads those of its role", ["role"])
_TOKEN = re.compile(rb"([A-Za-z0-9._-]{1,256})/([0-9]{1,16})")  # worker id and generation


class Leadership:
    """This process's claim to lead.

    A lease alone cannot stop a paused leader that does not know that its lease has ended. So the
    leader writes its documents by ``Bus.compare_and_set`` that expects ``fence``.

    Attributes:
        leader: worker id of the leader, as far as is known.
    """

    def __init__(
        self,
        bus: Bus,
        role: str,
        worker_id: str,
        generation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.leader = ""
        self._bus, self._key, self._clock = bus, f"leader:{role}", clock
        self._worker_id, self._token = worker_id, f"{worker_id}/{generation}".encode()
        self._until = float("-inf")
        self._turn = asyncio.Lock()  # two renewals at once would undo each other
        self._said = False  # the lead, as last logged

    @property
    def held(self) -> bool:
        """True while this process leads, by its own clock."""
        return self._clock() < self._until

    @property
    def fence(self) -> dict[str, bytes | None]:
        """The key and value that Redis holds while this process leads."""
        return {self._key: self._token}

    async def contend(self) -> None:
        """Take the lease if it is free or was held by an earlier start of this process; renew it.

        Raises:
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            # The lease runs from its grant, which is later.
            asked = self._clock()
            holder = await self._bus.get_bytes(self._key)
            if holder is None or holder == self._token or await self._may_be_replaced(holder):
                taken = await self._bus.compare_and_set(
                    {self._key: holder}, self.fence, ttl_s=LEASE_S
                )
                self._until = asked + LEASE_S if taken else float("-inf")
                holder = self._token if taken else holder
            else:
                self._until = float("-inf")
            self.leader = (holder or b"").decode(errors="replace").rpartition("/")[0]
            # Also after a lease that ran out unrenewed.
            if self.held != self._said:
                self._said = self.held
                log.info("leader.changed", leads=self.held, leader=self.leader)

    async def keep(self) -> None:
        """Contend for ever; Redis may come and go."""
        while True:
            with suppress(PeerLost):
                await self.contend()
            await asyncio.sleep(RENEW_S)

    async def resign(self) -> None:
        """Give up the lease, for another process to lead at once."""
        self._until = float("-inf")
        with suppress(PeerLost):
            await self._bus.compare_and_set(self.fence, {self._key: None})

    async def _may_be_replaced(self, holder: bytes) -> bool:
        """True for a lease of an earlier start of this process, and for a value that no scheduler wrote.

        Such a value would never expire.
        """
        token = _TOKEN.fullmatch(holder)
        if token is None or not await self._bus.expires_within(self._key, LEASE_S):
            return True
        ours = int(self._token.rpartition(b"/")[2])
        return token[1].decode() == self._worker_id and int(token[2]) < ours


@asynccontextmanager
async def leadership(
    bus: Bus, role: str, worker_id: str, generation: int
) -> AsyncIterator[Leadership]:
    """Contend for the lead of ``role`` for the length of the block."""
    claim = Leadership(bus, role, worker_id, generation)
    _leads.labels(role).set_function(lambda: claim.held)
    with suppress(PeerLost):
        await claim.contend()
    try:
        async with tended(claim.keep, "leadership"):
            yield claim
    finally:
        await claim.resign()
