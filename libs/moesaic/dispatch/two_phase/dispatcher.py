"""Rows to the experts and sums back, directly or in two phases (JANUS section 3.2).

One of a node's attention workers, the first by worker id that can be reached, is the *lead*. It
brings the node's rows together in rounds (``rounds``, ``joining``) and sends each as one batch
(``sending``), if there are many (``way``). Rows that fail in two phases are sent again directly:
the layer is late, never wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog
import torch
from torch import Tensor

from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.route import Route
from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.joining import Joining, join_reply, joining_rows
from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.nodes import Nodes
from moesaic.dispatch.two_phase.pings import LinkPings
from moesaic.dispatch.two_phase.rounds import Contribution, Rounds
from moesaic.dispatch.two_phase.sending import Sender
from moesaic.dispatch.two_phase.steps import RecentRows, Steps
from moesaic.dispatch.two_phase.way import MANY_ROWS, Mode, Way, way_of
from moesaic.errors import MoesaicError
from moesaic.messages.wire import WireDtype
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame

log = structlog.get_logger()

Direct = Callable[[], Awaitable[Tensor]]

MAX_ROWS = 8192  # of one round; half of what a frame may hold
ROWS_PER_TIMEOUT = 512  # a larger batch may take longer, in proportion
_FEW_S = 1.5  # before the rows of a node are counted again, if they were few
_ALONE_S = 0.25  # before a worker that nobody joined offers its rows again to one without work
_COOL_S = 1.0  # before two phases are tried again after a failure


class TwoPhaseDispatcher:
    """Gets the sums of a worker's rows, and of those that neighbours join to them.

    Lives on the engine thread's event loop.

    Attributes:
        steps: steps of this worker, with the advice of its lead.
        waits: the workers that come together in rounds, where this worker is the lead.
        pings: pings of links to other nodes, if this worker is the lead.
        trips: times of trips of rows to the lead, if that is another worker.
    """

    def __init__(
        self,
        network: Network,
        worker_id: str,
        node: str,
        mode: Mode,
        timeout_s: float,
        route_of: Callable[[int], Route | None],
        wire: WireDtype = "own",
    ) -> None:
        """Dispatch over ``network``.

        Args:
            network: network of this engine thread.
            worker_id: id of this attention worker.
            node: node that it is on.
            mode: see ``way_of``.
            timeout_s: longest wait for the sums of up to 512 rows; in proportion for more.
            route_of: the route of an epoch, if that epoch is in use.
            wire: form in which rows go to expert workers, and sums come back.
        """
        self._worker_id, self._node, self._mode = worker_id, node, mode
        self._timeout_s, self._route_of = timeout_s, route_of
        self._sender, self._joining = Sender(network, wire), Joining(network, worker_id)
        self._rounds = Rounds(self._send, MAX_ROWS)
        self.pings = LinkPings(lambda route: Nodes.of(route, route.live, node))
        self._route: Route | None = None
        self._nodes: dict[int, Nodes] = {}  # by layer, of ``_route``
        self.steps, self._recent = Steps(), RecentRows()
        self.waits, self.trips = self._rounds.waits, self._joining.trips

    @property
    def lead(self) -> str | None:
        """Worker id of the one that brings this worker's rows together now; ``None``: this one does."""
        link = self._joining.lead()
        return link.peer if link is not None else None

    def set_neighbours(self, neighbours: Sequence[Endpoint]) -> None:
        """Learn of the others on this node that may join rows."""
        if sorted(neighbours) == list(self._joining.neighbours):
            return
        self._joining.set_neighbours(neighbours)
        self._rounds.keep({neighbour.worker_id for neighbour in neighbours} | {self._worker_id})

    def goes_directly(self, route: Route, layers: Iterable[int]) -> bool:
        """True if there is no other way for any of these layers, as the workers stand now."""
        return not any(self._has_two_phases(self._nodes_of(route, layer)) for layer in layers)

    def count_directly(self, route: Route, layers: Iterable[int]) -> None:
        """Note that a batch of each of these layers has gone directly."""
        for layer in layers:
            _count_direct(self._nodes_of(route, layer))

    async def dispatch(self, route: Route, layer: int, hidden: Tensor, direct: Direct) -> Tensor:
        """Get the sum of every row's experts.

        Args:
            route: of the step's placement.
            layer: index of the decoder layer.
            hidden: ``[T, H]``; copied to the host only if they go in two phases.
            direct: asks the experts without two phases.

        Returns:
            The sums, float32 ``[T, H]``.

        Raises:
            MoesaicError: what ``direct`` raises.
        """
        nodes = self._nodes_of(route, layer)
        if not self._has_two_phases(nodes):
            _count_direct(nodes)
            return await direct()
        sums = await self._in_two_phases(route, layer, hidden)
        if sums is None:
            self.steps.go_directly()
            sums = await direct()
            _count_direct(nodes)
            metrics.ROUNDS.labels("direct").inc()
        return sums

    async def answer(self, request: Frame) -> Frame:
        """Take another worker's rows into a round; see ``messages.JoinRequest``.

        Raises:
            InvalidInput: the request is something else.
            StaleEpoch: this worker does not use the epoch.
            NotReady: it reaches other expert workers.
            MoesaicError: the round failed.
        """
        contribution = joining_rows(request, self._route_of)
        now_s, route = asyncio.get_running_loop().time(), contribution.route
        self.pings.see(route, now_s)
        # Later layers go the way of the first: of prompts, only the last rows are in the last one.
        rows = MANY_ROWS
        if request.layer == min(route.targets):
            rows = len(contribution.hidden)
            self._recent.note(contribution.worker_id, rows, now_s)
            if not self._are_few(route, request.layer):
                self.steps.few_until_s = 0.0
        left_s = self.steps.directly_for_s(rows, now_s)
        left_s = _FEW_S if self._mode == "direct" else left_s
        # Nothing is brought together; it need not wait to learn that.
        if left_s:
            return join_reply(request, JoinReply("direct", left_s))
        sums = await self._rounds.join(request.layer, contribution)
        advice = self._advice(contribution.members)
        # The round goes directly, whatever else has become of the advice.
        if sums is None:
            advice = JoinReply("direct", advice.for_s if advice.next == "direct" else 0.0)
        return join_reply(request, advice, sums)

    async def close(self) -> None:
        """Drop all links to neighbours; rounds that run fail."""
        await self.pings.close()
        await self._rounds.close()
        await self._joining.close()

    def _has_two_phases(self, nodes: Nodes) -> bool:
        """Tell if rows go in two phases to these nodes, if they are many."""
        return self._way(nodes, MANY_ROWS) != "direct"

    def _way(self, nodes: Nodes, rows: int) -> Way:
        return way_of(self._mode, nodes, rows, has_neighbours=bool(self._joining.neighbours))

    def _nodes_of(self, route: Route, layer: int) -> Nodes:
        if route is not self._route:
            self._route, self._nodes = route, {}
        if layer not in self._nodes:
            self._nodes[layer] = Nodes.of(route, route.targets[layer], self._node)
        return self._nodes[layer]

    async def _in_two_phases(self, route: Route, layer: int, hidden: Tensor) -> Tensor | None:
        """Get sums with rows brought together; ``None`` if they should go directly, or something failed."""
        now_s = asyncio.get_running_loop().time()
        first = layer == min(route.targets)
        if first:
            self._begin(route, layer, len(hidden), now_s)
        if not self.steps.may_meet(now_s):
            return None
        hidden = hidden.cpu()
        lead = None if self.steps.is_alone(first, now_s) else self._joining.lead()
        try:
            if lead is None:
                return await self._rounds.join(layer, Contribution(self._worker_id, hidden, route))
            return await self._join(lead, route, layer, hidden, first)
        except MoesaicError as error:
            self.steps.direct_until_s = asyncio.get_running_loop().time() + _COOL_S
            metrics.FALLBACKS.labels(error.code).inc()
            log.warning("exchange.failed", layer=layer, cause=str(error))
            return None

    def _begin(self, route: Route, layer: int, rows: int, now_s: float) -> None:
        """Begin a step. The lead counts its node's rows: if they are few, nobody is waited for."""
        leads = self._joining.lead() is None
        self._recent.note(self._worker_id, rows, now_s)
        if leads:
            self.pings.see(route, now_s)
            if not self._are_few(route, layer):
                self.steps.few_until_s = 0.0
            elif now_s >= self.steps.few_until_s:
                self.steps.few_until_s = now_s + _FEW_S
        self.steps.begin(rows, now_s)
        if leads and not self.steps.may_meet(now_s):
            self._rounds.pass_by(self._worker_id)

    def _are_few(self, route: Route, layer: int) -> bool:
        """Count the rows of steps that began recently on this node, in this round or not."""
        rows = self._recent.rows(asyncio.get_running_loop().time())
        return self._way(self._nodes_of(route, layer), rows) == "direct"

    async def _join(
        self, lead: Link, route: Route, layer: int, hidden: Tensor, first: bool
    ) -> Tensor | None:
        """Get the sums of these rows from the lead; ``None`` if that takes too long."""
        answer = await self._joining.join(
            lead,
            route.placement.epoch,
            layer,
            [hidden, route.encoded[layer]],
            first=first,
            patience_s=self._patience_s(len(hidden)),
        )
        if answer is None:
            return None
        sums, advice = answer
        self.steps.heed(advice, asyncio.get_running_loop().time())
        return sums

    def _advice(self, members: int) -> JoinReply:
        """Advise a worker whose rows were in a round of so many workers."""
        now_s = asyncio.get_running_loop().time()
        if left_s := self.steps.directly_for_s(0, now_s):
            return JoinReply("direct", left_s)
        if members == 1:
            # If this worker has steps of its own, the two will meet at the next one.
            return JoinReply("alone", _ALONE_S if self.steps.is_idle(now_s) else 0.0)
        return JoinReply("offer")

    async def _send(self, layer: int, members: Sequence[Contribution]) -> Tensor | None:
        """Send a round; ``None`` if its rows should rather go directly."""
        route = members[0].route
        hidden = torch.cat([m.hidden for m in members]) if len(members) > 1 else members[0].hidden
        if layer == min(route.targets) and self._are_few(route, layer):
            self.steps.few_until_s = asyncio.get_running_loop().time() + _FEW_S
            return None
        nodes = self._nodes_of(route, layer)
        way, patience_s = self._way(nodes, MANY_ROWS), self._patience_s(len(hidden))
        sums = await self._sender.send(way, route, layer, nodes, hidden, patience_s)
        metrics.ROUNDS.labels(way).inc()
        return sums

    def _patience_s(self, rows: int) -> float:
        return self._timeout_s * max(1.0, rows / ROWS_PER_TIMEOUT)


def _count_direct(nodes: Nodes) -> None:
    metrics.MESSAGES.labels("intra").inc(2 * len(nodes.own))
    metrics.MESSAGES.labels("inter").inc(2 * sum(len(node) for node in nodes.others))
