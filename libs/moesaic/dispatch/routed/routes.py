"""Keeps a route to the experts: dials placed workers, and switches placements when it can."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import structlog

from moesaic.dispatch.links import DialledLinks, Endpoint, LinkEvents
from moesaic.dispatch.route import Route, plan_route
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

# So long a placement whose workers are not all linked is waited for, before united experts stand in for those of the
# others: links come and go at the start, and after a change.
STAND_IN_AFTER_S = 0.3
# So long after a newer placement the one before is used rather, if the newer one lacks experts. Expert workers keep
# earlier ones for longer.
PREFER_EARLIER_S = 30.0
PLAN_EVERY_S = 1.0  # while an earlier placement is in use
LINK_EVENTS = LinkEvents("expert_worker.linked", "expert_worker.unreachable")


class Routes:
    """Routes of the newest placement, or of the one before until the newest can serve."""

    def __init__(
        self, network: Network, scheduling: ExpertScheduling, *, stands_in: bool = True
    ) -> None:
        """Dial over ``network``.

        Args:
            network: network of the engine thread.
            scheduling: how expert workers choose among replicas.
            stands_in: united experts may serve for those that nobody holds.
        """
        self._scheduling: ExpertScheduling = scheduling
        self._stands_in = stands_in
        self._newest: Placement | None = None  # to switch to
        self._in_use: Placement | None = None  # serves until the newest can
        self._pinned: dict[bytes, Placement] = {}  # by steps that have not ended
        self._links: DialledLinks[Endpoint] = DialledLinks(network, LINK_EVENTS, self._dialled)
        self._route: Route | None = None
        self._newest_since_s = self._planned_s = 0.0
        self._lacking: dict[int, float] = {}  # since when; by epochs that lack experts
        self._told: tuple[int, tuple[int, ...]] | None = None  # of a route whose lack was logged
        self._changed = asyncio.Event()

    @property
    def current(self) -> Route | None:
        """The route of the newest placement that can be served, kept until it changes."""
        route, now_s = self._route, time.monotonic()
        if route and route.usable:
            # A link that comes makes it plan anew at once.
            is_newest = route.placement is self._newest
            if is_newest or now_s - self._planned_s < PLAN_EVERY_S:
                return route
        self._route, self._planned_s = None, now_s
        possible = [(p, r) for p in self._known if (r := self._planned(p)) is not None]
        # What serves everything goes first, for a while even if it is the earlier placement.
        if now_s - self._newest_since_s < PREFER_EARLIER_S:
            possible.sort(key=lambda pair: pair[1].has_lost)
        for placement, found in possible:
            if found.has_lost and not self._may_stand_in(found):
                continue
            if self._in_use is not placement:
                log.info("route.switched", epoch=placement.epoch, workers=len(found.live))
            self._route, self._in_use = found, placement
            break
        self._refresh()
        return self._route

    def _planned(self, placement: Placement) -> Route | None:
        links = {
            idx: link
            for idx, worker in enumerate(placement.workers)
            if (link := self._links.get(Endpoint.of(worker))) is not None
        }
        route = plan_route(placement, links, self._scheduling)
        if route is None or not route.has_lost:
            self._lacking.pop(placement.epoch, None)
            if self._told is not None and self._told[0] == placement.epoch:
                self._told = None
        return route

    def _may_stand_in(self, route: Route) -> bool:
        """True once united experts may stand in for those that a placement lacks."""
        if not self._stands_in:
            return False
        known = {placement.epoch for placement in self._known}
        self._lacking = {epoch: since for epoch, since in self._lacking.items() if epoch in known}
        now_s, epoch = time.monotonic(), route.placement.epoch
        since_s = self._lacking.setdefault(epoch, now_s)
        if now_s - since_s < STAND_IN_AFTER_S:
            return False
        if self._told != (epoch, route.live):
            self._told = epoch, route.live
            log.warning("route.stands_in", epoch=epoch, workers=len(route.live))
        return True

    @property
    def waiting_for(self) -> list[str]:
        """Reasons why there is no route, for people."""
        if self._newest is None:
            return ["a placement from the scheduler"]
        if self.current is not None:
            return []
        unlinked = [
            w.worker_id for w in self._newest.workers if self._links.get(Endpoint.of(w)) is None
        ]
        return [f"expert workers of epoch {self._newest.epoch}: {', '.join(unlinked)}"]

    def set_placement(self, placement: Placement) -> None:
        """Learn a committed placement; earlier ones change nothing."""
        if self._newest is None or placement.epoch > self._newest.epoch:
            self._newest, self._newest_since_s = placement, time.monotonic()
            self._planned_s = 0.0
            # Dials now: an idle engine begins no step that would.
            _ = self.current

    def pin(self, step_id: bytes, placement: Placement) -> None:
        """Keep the links of a placement until the step has ended."""
        self._pinned[step_id] = placement

    def unpin(self, step_id: bytes) -> None:
        """End what ``pin`` began."""
        if self._pinned.pop(step_id, None) is not self._in_use:
            self._refresh()

    def plan_anew(self) -> None:
        """Plan again when a route is next asked for, without workers that are lost."""
        self._route = None
        self._refresh()

    async def reachable(self) -> None:
        """Wait until there is a route."""
        while self.current is None:
            self._changed.clear()
            # United experts may stand in later, without any news.
            with suppress(TimeoutError):
                async with asyncio.timeout(STAND_IN_AFTER_S if self._lacking else None):
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        await self._links.close()

    @property
    def _known(self) -> list[Placement]:
        known = [p for p in (self._newest, self._in_use) if p is not None]
        return known[:1] if len(known) == 2 and known[0] is known[1] else known

    def _refresh(self) -> None:
        """Dial the placed workers, and drop links to others.

        Links that a step has pinned stay: losing one would fail the step.
        """
        placed = _endpoints(self._known)
        self._links.keep(placed, _endpoints(self._pinned.values()))
        for endpoint in placed:
            self._links.dial(endpoint)

    def _dialled(self, _endpoint: Endpoint, link: Link | None) -> None:
        """Use a worker that was linked, also if no step is about to begin."""
        if link is not None:
            self._route = None
            _ = self.current
            self._changed.set()


def _endpoints(placements: Iterable[Placement]) -> list[Endpoint]:
    return [Endpoint.of(worker) for placement in placements for worker in placement.workers]
