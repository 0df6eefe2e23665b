"""Pings of links to other nodes, beside steps: soon when links are new, and again now and then.

They tell the performance model what a link costs: steps in two phases cannot part its time from that of experts.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from moesaic.costs import CostBook
from moesaic.dispatch.route import Route
from moesaic.dispatch.two_phase.nodes import Nodes
from moesaic.transport.contract import Link
from moesaic.transport.probing import MORE_BYTES, PROBE_S, measure_round_trip

log = structlog.get_logger()

BURST = 8  # messages at the same time, of which pings find the overhead of each
MEASUREMENTS = 5  # of which the best counts
_SMALL_PINGS, _LARGE_PINGS = 10, 3
_PAUSE_S = 0.5  # between the first ones; by chance, so that nodes seldom measure at the same time
_AGAIN_S = 120.0  # between later ones
_RETRY_S = (1.0, 60.0)  # after one that failed; twice as long each time
_IDLE_S = 4.0  # without a layer; then nothing is measured


class LinkTimes(NamedTuple):
    """Seconds of messages over a link, one way."""

    alone_s: float  # an empty one
    burst_s: float  # ``BURST`` empty ones at the same time
    byte_s: float  # each byte more


async def measure_link(link: Link) -> LinkTimes:
    """Ping with messages of two sizes, one by one and several at once; the fastest of each count.

    Raises:
        DeadlineExceeded: a ping took seconds.
        PeerLost: the link ended.
    """
    alone_s, byte_s = await measure_round_trip(link, _SMALL_PINGS, _LARGE_PINGS)
    burst_s = min([await _burst(link) for _ in range(_SMALL_PINGS)])
    return LinkTimes(alone_s / 2, burst_s / 2, byte_s)


def best(found: Iterable[LinkTimes]) -> LinkTimes:
    """Take the least of each, of measurements of one link, since other load only adds time."""
    return LinkTimes(*map(min, zip(*found, strict=True)))


def slowest(found: Iterable[LinkTimes]) -> LinkTimes:
    """Take the most of each, of several links: rows wait for all of them."""
    return LinkTimes(*map(max, zip(*found, strict=True)))


class LinkPings:
    """Measures the links of a route. Lives on the engine thread's event loop.

    Attributes:
        book: costs of links between nodes, as a part of the performance model.
    """

    def __init__(self, nodes_of: Callable[[Route], Nodes]) -> None:
        """Measure one link to each node that ``nodes_of`` finds beside the own one."""
        self._nodes_of = nodes_of
        self.book = CostBook()
        self._route: Route | None = None
        self._used_s = float("-inf")
        self._found: deque[list[LinkTimes]] = deque(maxlen=MEASUREMENTS)
        self._tried: object = None  # the workers that these are of
        self._due_s, self._retry_s = 0.0, _RETRY_S[0]
        self._running: asyncio.Task[None] | None = None

    def see(self, route: Route, now_s: float) -> None:
        """Note that rows go to these workers now, and begin to measure."""
        self._route, self._used_s = route, now_s
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
            now_s, workers = loop.time(), self._workers()
            if self._route is None or now_s > self._used_s + _IDLE_S:
                continue
            if workers != self._tried:
                self._tried, self._due_s, self._retry_s = workers, 0.0, _RETRY_S[0]
                self._found.clear()
            if now_s >= self._due_s:
                await self._measure(self._route)

    async def _measure(self, route: Route) -> None:
        loop = asyncio.get_running_loop()
        try:
            links = [route.links[workers[0]] for workers in self._nodes_of(route).others]
            self._found.append([await measure_link(link) for link in links])
            self._tell(slowest(map(best, zip(*self._found, strict=True))))
        except Exception as error:  # of whatever kind: a later try may do better
            log.warning("links.not_measured", cause=repr(error))
            self._due_s = loop.time() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
            return
        self._retry_s = _RETRY_S[0]
        self._due_s = loop.time() + (_AGAIN_S if len(self._found) == MEASUREMENTS else 0.0)

    def _tell(self, times: LinkTimes) -> None:
        alone_s, burst_s, byte_s = times
        # Hops, messages and bytes.
        self.book.add("link.inter", (1, 1, 0), alone_s)
        self.book.add("link.inter", (1, BURST, 0), burst_s)
        self.book.add("link.inter", (1, 1, MORE_BYTES), alone_s + MORE_BYTES * byte_s)
        log.info(
            "link.measured",
            alone_us=round(1e6 * alone_s, 1),
            burst_us=round(1e6 * burst_s, 1),
            mb_per_s=round(1e-6 / byte_s, 1),
        )

    def _workers(self) -> object:
        """Tell links apart: placements on the same workers have the same."""
        route = self._route
        live = [route.placement.workers[idx] for idx in route.live] if route is not None else []
        return [(w.node_name, w.worker_id, w.generation) for w in live]


async def _burst(link: Link) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(link.probe(0, PROBE_S) for _ in range(BURST)))
    return loop.time() - started
