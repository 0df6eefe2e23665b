"""The one keeper of dialled links: every way of dispatch reaches its peers through it."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from moesaic.errors import PeerLost
from moesaic.messages.placement import PlacedWorker
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

DIAL_TIMEOUT_S = 5.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # after failures; the last one repeats
LOGGED_FAILURES = (0, 10)  # of one endpoint: the others would only repeat them


@dataclass(frozen=True, order=True)
class Endpoint:
    """One start of a worker, and the address that it listens at."""

    worker_id: str
    generation: int
    address: str

    @classmethod
    def of(cls, worker: PlacedWorker) -> "Endpoint":
        """The address at which a placed worker takes rows."""
        return Endpoint(worker.worker_id, worker.generation, worker.data_address)

    @property
    def log_fields(self) -> dict[str, Any]:
        """Fields of the event of a new link."""
        return {"peer": self.worker_id, "generation": self.generation}


class LinkEvents(NamedTuple):
    """Names of the log events of one kind of peers."""

    linked: str
    unreachable: str


E = TypeVar("E", bound=Endpoint)
OnDialled = Callable[[E, Link | None], None]  # after each attempt; ``None``: it failed


class DialledLinks(Generic[E]):
    """One link to each endpoint that was asked for. Lives on the event loop of ``network``.

    An endpoint is dialled, again and again, from the first ``dial`` or ``reach`` until it is linked
    or ``keep`` leaves it out. A link that is lost is dialled anew when it is next asked for, or at
    once with ``redial``.
    """

    def __init__(
        self,
        network: Network,
        events: LinkEvents,
        on_dialled: OnDialled[E] | None = None,
        *,
        redial: bool = False,
    ) -> None:
        """
        Args:
            network: to dial over.
            events: names of what is logged.
            on_dialled: called after each attempt.
            redial: dial anew whenever a link is lost, within a second.
        """
        self._network, self._events, self._redial = network, events, redial
        self._on_dialled = on_dialled
        self._links: dict[E, Link] = {}
        self._dialling: dict[E, asyncio.Task[None]] = {}
        self._attempts: dict[E, asyncio.Event] = {}  # under way; set at their end

    @property
    def num_alive(self) -> int:
        """Links that can be used now."""
        return sum(link.alive for link in self._links.values())

    def get(self, endpoint: E) -> Link | None:
        """The link, if there is one now."""
        link = self._links.get(endpoint)
        return link if link is not None and link.alive else None

    def dial(self, endpoint: E) -> Link | None:
        """The link, if there is one now; else it is dialled in the background."""
        if endpoint not in self._dialling and (self._redial or self.get(endpoint) is None):
            self._attempts.setdefault(endpoint, asyncio.Event())
            self._dialling[endpoint] = asyncio.ensure_future(self._dial(endpoint))
        return self.get(endpoint)

    async def reach(self, endpoint: E, deadline_s: float) -> Link:
        """The link; if need be, after one attempt to dial.

        Raises:
            PeerLost: there is none within ``deadline_s``, the attempt has failed, or the next one
                waits for its turn.
        """
        link = self.dial(endpoint)
        if link is None and (attempt := self._attempts.get(endpoint)) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await attempt.wait()
            link = self.get(endpoint)
        if link is None:
            raise PeerLost(endpoint.worker_id, "cannot be reached")
        return link

    def keep(self, endpoints: Collection[E], pinned: Collection[E] = ()) -> None:
        """Stop dialling all but ``endpoints``, and drop links to all but them and ``pinned``."""
        for endpoint in [known for known in self._dialling if known not in endpoints]:
            self._dialling.pop(endpoint).cancel()
            if (attempt := self._attempts.pop(endpoint, None)) is not None:
                attempt.set()
        for endpoint in [each for each in self._links if each not in (*endpoints, *pinned)]:
            self._links.pop(endpoint).discard("no longer wanted")

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        tasks = list(self._dialling.values())
        self.keep(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dial(self, endpoint: E) -> None:
        failures = 0
        try:
            while True:
                # Watched until it is lost.
                if self.get(endpoint) is not None:
                    await asyncio.sleep(PAUSES_S[-1])
                elif await self._attempt(endpoint, failures):
                    failures = 0
                    if not self._redial:
                        return
                else:
                    await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                    failures += 1
        finally:
            if self._dialling.get(endpoint) is asyncio.current_task():
                del self._dialling[endpoint]

    async def _attempt(self, endpoint: E, failures: int) -> bool:
        """Dial once.

        Returns:
            Success.
        """
        ended = self._attempts.setdefault(endpoint, asyncio.Event())
        link = None
        try:
            link = await self._network.connect(endpoint.address, endpoint.worker_id, DIAL_TIMEOUT_S)
            self._links[endpoint] = link
            log.info(self._events.linked, **endpoint.log_fields)
        except Exception as error:  # of whatever kind: a later try may do better
            if failures in LOGGED_FAILURES:
                log.warning(self._events.unreachable, peer=endpoint.worker_id, cause=repr(error))
        finally:
            if self._attempts.get(endpoint) is ended:
                del self._attempts[endpoint]
            ended.set()
        if self._on_dialled is not None:
            self._on_dialled(endpoint, link)
        return link is not None
