"""One leader at a time, others ready to take over."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.errors import PeerLost

log = structlog.get_logger()

LEASE_S = 10
RENEW_S = 3.0


class Leadership:
    """This process's claim to lead.

    A lease alone cannot stop a leader that was paused and does not know that its time is over. So
    whatever only a leader may write is written by ``Bus.compare_and_set`` with ``fence`` among what
    is expected.
    """

    def __init__(self, bus: Bus, role: str, worker_id: str, generation: int) -> None:
        self.leader = ""  # worker id of who leads, as far as is known
        self._bus, self._key = bus, f"leader:{role}"
        self._worker_id, self._token = worker_id, f"{worker_id}/{generation}".encode()
        self._until = float("-inf")
        self._turn = asyncio.Lock()  # one renewal would undo the other
        self._said = False  # whether we lead, as the log has it

    @property
    def held(self) -> bool:
        """Whether this process leads, by its own clock."""
        return time.monotonic() < self._until

    @property
    def fence(self) -> dict[str, bytes | None]:
        """What Redis holds while this process leads."""
        return {self._key: self._token}

    async def contend(self) -> None:
        """Take the lease if it is free or was held by an earlier start of this process; renew it.

        Raises:
            PeerLost: Redis did not answer.
        """
        async with self._turn:
            asked = time.monotonic()  # the lease runs from its grant, which is later
            holder = await self._bus.get_bytes(self._key)
            if holder is None or holder == self._token or self._is_predecessor(holder):
                taken = await self._bus.compare_and_set(
                    {self._key: holder}, self.fence, ttl_s=LEASE_S
                )
                self._until = asked + LEASE_S if taken else float("-inf")
                holder = self._token if taken else holder
            else:
                self._until = float("-inf")
            self.leader = (holder or b"").decode(errors="replace").rpartition("/")[0]
            if self.held != self._said:  # also when it ran out while nobody renewed it
                self._said = self.held
                log.info("leader.changed", leads=self.held, leader=self.leader)

    async def keep(self) -> None:
        """Contend for ever; Redis may come and go."""
        while True:
            with suppress(PeerLost):
                await self.contend()
            await asyncio.sleep(RENEW_S)

    async def resign(self) -> None:
        """Let someone else lead at once."""
        self._until = float("-inf")
        with suppress(PeerLost):
            await self._bus.compare_and_set(self.fence, {self._key: None})

    def _is_predecessor(self, holder: bytes) -> bool:
        worker_id, _, generation = holder.decode(errors="replace").rpartition("/")
        ours = int(self._token.rpartition(b"/")[2])
        return worker_id == self._worker_id and generation.isdigit() and int(generation) < ours


@asynccontextmanager
async def leadership(
    bus: Bus, role: str, worker_id: str, generation: int
) -> AsyncIterator[Leadership]:
    """Contend for the lead of ``role`` for the length of the block."""
    claim = Leadership(bus, role, worker_id, generation)
    with suppress(PeerLost):
        await claim.contend()
    try:
        async with background(claim.keep(), "leadership"):
            yield claim
    finally:
        await claim.resign()
