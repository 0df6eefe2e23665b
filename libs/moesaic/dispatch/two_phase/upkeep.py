"""Measuring of links beside steps: soon when they are new, and again now and then."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import structlog

from moesaic.costs import CostBook
from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.two_phase.choice.chooser import RoundChooser
from moesaic.dispatch.two_phase.choice.costs import BURST, LinkCosts, LinkSurvey
from moesaic.dispatch.two_phase.measure import measure_links
from moesaic.dispatch.two_phase.nodes import Nodes, Reach
from moesaic.messages.performance import Part
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

MEASUREMENTS = 5  # of which the best counts
PINGS: tuple[tuple[int, int, int], ...] = (
    (1, 1, 0),
    (1, BURST, 0),
    (1, 1, 1 << 19),
)  # hops, messages, bytes
LINKS: tuple[Part, Part] = "link.intra", "link.inter"
_PAUSE_S = 0.5  # between the first ones; by chance, so that nodes seldom measure at the same time
_AGAIN_S = 120.0  # between later ones
_RETRY_S = (1.0, 60.0)  # after one that failed; twice as long each time
_IDLE_S = 4.0  # without a layer; then nothing is measured
_REACH_S = 1.0  # for a link to a neighbour


class LinkUpkeep:
    """Keeps the link costs of a chooser up to date. Lives on the engine thread's event loop.

    Attributes:
        book: the same costs, as parts of the performance model.
    """

    def __init__(
        self,
        network: Network,
        node: str,
        chooser: RoundChooser,
        reach_near: Callable[[Endpoint, float], Awaitable[Link]],
    ) -> None:
        """Measure for ``chooser``.

        Args:
            network: of this engine thread.
            node: that this worker is on.
            chooser: learns what links cost.
            reach_near: gives a link to a neighbour, within some seconds.
        """
        self._network, self._node = network, node
        self._chooser, self._reach_near = chooser, reach_near
        self.book = CostBook()
        self._neighbours: Sequence[Endpoint] = ()
        self._reach: Reach | None = None
        self._used_s = float("-inf")
        self._found: deque[LinkSurvey] = deque(maxlen=MEASUREMENTS)
        self._tried: object = None  # the links that these are of
        self._due_s, self._retry_s = 0.0, _RETRY_S[0]
        self._running: asyncio.Task[None] | None = None

    @property
    def is_sure(self) -> bool:
        """True once the links have been measured often enough, or while nothing needs that."""
        if asyncio.get_running_loop().time() > self._used_s + _IDLE_S:
            return True
        return len(self._found) == MEASUREMENTS and self._tried == self._links()

    def set_neighbours(self, neighbours: Sequence[Endpoint]) -> None:
        """Learn to whom links inside the node can be measured."""
        self._neighbours = neighbours

    def see(self, reach: Reach, now_s: float) -> None:
        """Note that rows go to these workers now, and begin to measure."""
        self._reach, self._used_s = reach, now_s
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(random.uniform(0.2, 1.0) * _PAUSE_S)
            now_s, links = loop.time(), self._links()
            if self._reach is None or now_s > self._used_s + _IDLE_S:
                continue
            if links != self._tried:
                self._tried, self._due_s, self._retry_s = links, 0.0, _RETRY_S[0]
                self._found.clear()
            if now_s >= self._due_s:
                await self._measure(self._reach, self._neighbours[:1])

    async def _measure(self, reach: Reach, neighbours: Sequence[Endpoint]) -> None:
        loop = asyncio.get_running_loop()
        try:
            nodes = Nodes.of(reach, reach.live, self._node)
            near = [await self._reach_near(neighbour, _REACH_S) for neighbour in neighbours]
            self._found.append(await measure_links(self._network, reach, nodes, near))
            costs = LinkCosts.of(self._found)
        except Exception as error:  # what others answer may be of any kind
            log.warning("links.not_measured", cause=repr(error))
            self._due_s = loop.time() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
            return
        self._retry_s = _RETRY_S[0]
        self._due_s = loop.time() + (_AGAIN_S if len(self._found) == MEASUREMENTS else 0.0)
        self._chooser.costs = costs
        for part, each in zip(LINKS, (costs.intra, costs.inter), strict=True):
            for amounts in PINGS:
                self.book.add(part, amounts, each.part.seconds(*amounts))
        for link, cost in (("intra", costs.intra), ("inter", costs.inter)):
            log.info(
                "link.measured",
                link=link,
                latency_us=round(1e6 * cost.latency_s, 1),
                message_us=round(1e6 * cost.message_s, 1),
                mb_per_s=round(cost.bytes_per_s / 1e6, 1),
            )

    def _links(self) -> object:
        """Tell links apart: placements on the same workers have the same."""
        reach = self._reach
        live = [reach.placement.workers[idx] for idx in reach.live] if reach is not None else []
        return [(w.node_name, w.worker_id, w.generation) for w in live], list(self._neighbours)
