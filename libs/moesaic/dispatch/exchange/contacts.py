"""Links to workers of the own node, dialled when they are first wanted."""

import asyncio
from collections.abc import Collection
from typing import NamedTuple

import structlog

from moesaic.errors import PeerLost
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

DIAL_TIMEOUT_S = 5.0
RETRY_S = 1.0  # after a dial that failed


class Contact(NamedTuple):
    """One start of a worker, and where it listens."""

    worker_id: str
    generation: int
    address: str


class Contacts:
    """Lives on the event loop of ``network``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._links: dict[Contact, Link] = {}
        self._dialling: dict[Contact, asyncio.Task[Link | None]] = {}
        self._failed_at: dict[Contact, float] = {}

    def link(self, contact: Contact) -> Link | None:
        """The link, if there is one now; else it is dialled in the background."""
        link = self._links.get(contact)
        if link is not None and link.alive:
            return link
        self._dial(contact)
        return None

    async def reach(self, contact: Contact, deadline_s: float) -> Link:
        """The link, dialled if need be.

        Raises:
            PeerLost: there is none within ``deadline_s``.
        """
        link = self.link(contact)
        if link is None and (dialling := self._dialling.get(contact)) is not None:
            await asyncio.wait({dialling}, timeout=deadline_s)
            link = self._links.get(contact)
        if link is None or not link.alive:
            raise PeerLost(contact.worker_id, "cannot be reached from its own node")
        return link

    def keep(self, contacts: Collection[Contact]) -> None:
        """Drop the links to all others."""
        for contact in [known for known in self._dialling if known not in contacts]:
            self._dialling.pop(contact).cancel()
        for contact in [known for known in self._links if known not in contacts]:
            self._links.pop(contact).discard("no longer on this node")
        self._failed_at = {c: at for c, at in self._failed_at.items() if c in contacts}

    async def close(self) -> None:
        """Drop all links."""
        tasks = list(self._dialling.values())
        self.keep(())
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dial(self, contact: Contact) -> None:
        loop = asyncio.get_running_loop()
        failed_at = self._failed_at.get(contact)
        if failed_at is not None and loop.time() < failed_at + RETRY_S:
            return
        if contact not in self._dialling:
            task = self._dialling[contact] = loop.create_task(self._connect(contact))
            task.add_done_callback(lambda _: self._dialled(contact, task))

    def _dialled(self, contact: Contact, task: "asyncio.Task[Link | None]") -> None:
        if self._dialling.get(contact) is task:
            del self._dialling[contact]

    async def _connect(self, contact: Contact) -> Link | None:
        try:
            link = await self._network.connect(contact.address, contact.worker_id, DIAL_TIMEOUT_S)
        except Exception as error:  # of whatever kind: a later try may do better
            self._failed_at[contact] = asyncio.get_running_loop().time()
            log.warning("neighbour.unreachable", peer=contact.worker_id, cause=repr(error))
            return None
        self._links[contact] = link
        log.info("neighbour.linked", peer=contact.worker_id, generation=contact.generation)
        return link
