"""Rows to the experts and sums back, directly or in two phases (JANUS section 3.2).

One of a node's attention workers, the first by worker id that can be reached, is the *lead*. It brings
the node's rows together in rounds (``rounds``, ``joining``) and sends each as one batch (``sending``), the way that
should be the fastest (``choice``). Whatever goes wrong in two phases is asked again directly: the
layer is late, never wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog
import torch
from torch import Tensor

from moesaic.costs import CostBook
from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.choice.chooser import Mode, RoundChooser
from moesaic.dispatch.two_phase.choice.costs import LinkCosts
from moesaic.dispatch.two_phase.joining import Joining, join_reply, joining_rows
from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.nodes import Nodes, Reach
from moesaic.dispatch.two_phase.rounds import Contribution, Rounds
from moesaic.dispatch.two_phase.sending import Sender
from moesaic.dispatch.two_phase.steps import RecentJoins, Steps
from moesaic.dispatch.two_phase.upkeep import LinkUpkeep
from moesaic.errors import MoesaicError
from moesaic.experts.wire_rows import row_bytes
from moesaic.messages.wire import WireDtype
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame

log = structlog.get_logger()

Direct = Callable[[], Awaitable[Tensor]]

MAX_ROWS = 8192  # of one round; half of what a frame may hold
ROWS_PER_TIMEOUT = 512  # a larger batch may take longer, in proportion
_DIRECT_S = 1.5  # before two phases are considered again, when they should be slower
_ALONE_S = 0.25  # before a worker that nobody joined offers its rows again to one without work
_COOL_S = 1.0  # before two phases are tried again after a failure


class TwoPhaseDispatcher:
    """Gets the sums of a worker's rows, and of those that neighbours join to them.

    Lives on the engine thread's event loop.

    Attributes:
        steps: of this worker, with what its lead has advised.
        waits: the workers that come together in rounds, where this worker is the lead.
        trips: what those of rows to the lead take, where another one is.
    """

    def __init__(
        self,
        network: Network,
        worker_id: str,
        node: str,
        mode: Mode,
        timeout_s: float,
        reach_of: Callable[[int], Reach | None],
        wire: WireDtype = "own",
    ) -> None:
        """Dispatch over ``network``.

        Args:
            network: of this engine thread.
            worker_id: of this attention worker.
            node: that it is on.
            mode: the way to go, or ``auto``: the one that should be the fastest.
            timeout_s: longest wait for the sums of up to 512 rows; in proportion for more.
            reach_of: what of an epoch's placement can be reached now, if that epoch is in use.
            wire: form in which rows go to expert workers, and sums come back.
        """
        self._worker_id, self._node, self._mode = worker_id, node, mode
        self._timeout_s, self._reach_of = timeout_s, reach_of
        self._wire = wire
        self._sender, self._joining = Sender(network, wire), Joining(network, worker_id)
        self._rounds, self._chooser = Rounds(self._send, MAX_ROWS), RoundChooser(mode)
        self._upkeep = LinkUpkeep(network, node, self._chooser, self._joining.reach)
        self._reach: Reach | None = None
        self._nodes: dict[int, Nodes] = {}  # by layer, of ``_reach``
        self.steps, self._recent = Steps(), RecentJoins()
        self.waits, self.trips = self._rounds.waits, self._joining.trips

    @property
    def book(self) -> CostBook:
        """See ``RowCarrier.book``."""
        return self._upkeep.book

    @property
    def costs(self) -> LinkCosts | None:
        """Costs of links; ``None`` before they are measured."""
        return self._chooser.costs

    @property
    def is_sure(self) -> bool:
        """True where nothing is left to measure, or another worker chooses."""
        return self._upkeep.is_sure

    @property
    def lead(self) -> str | None:
        """Worker id of the one that brings this worker's rows together now; ``None``: this one does."""
        link = self._joining.lead()
        return link.peer if link is not None else None

    def set_neighbours(self, neighbours: Sequence[Endpoint], attention_nodes: int = 1) -> None:
        """Learn of the others on this node that may join rows, and how many nodes have such workers."""
        self._chooser.senders = max(1, attention_nodes)
        if sorted(neighbours) == list(self._joining.neighbours):
            return
        self._joining.set_neighbours(neighbours)
        self._upkeep.set_neighbours(self._joining.neighbours)
        self._rounds.keep({neighbour.worker_id for neighbour in neighbours} | {self._worker_id})

    def goes_directly(self, reach: Reach, layers: Iterable[int]) -> bool:
        """See ``RowCarrier.goes_directly``."""
        return not any(self._has_two_phases(self._nodes_of(reach, layer)) for layer in layers)

    def count_directly(self, reach: Reach, layers: Iterable[int]) -> None:
        """See ``RowCarrier.count_directly``."""
        for layer in layers:
            _count_direct(self._nodes_of(reach, layer))

    async def dispatch(
        self, reach: Reach, layer: int, hidden: Tensor, direct: Direct, step_id: bytes = b""
    ) -> Tensor:
        """Get the sum of every row's experts.

        Args:
            reach: of the step's placement.
            layer: index of the decoder layer.
            hidden: ``[T, H]``, on the CPU.
            direct: asks the experts without two phases.
            step_id: of the step, which may have several batches under way.

        Returns:
            The sums, float32 ``[T, H]``.

        Raises:
            MoesaicError: what ``direct`` raises.
        """
        nodes, lane = self._nodes_of(reach, layer), self.steps.lane(step_id, layer)
        if not self._has_two_phases(nodes):
            _count_direct(nodes)
            return await direct()
        now_s = asyncio.get_running_loop().time()
        if layer == min(reach.targets):
            self.steps.begin(lane, now_s)
        sums = await self._in_two_phases(reach, layer, lane, hidden, now_s)
        if sums is None:
            self.steps.go_directly(lane)
            sums = await self._directly(nodes, layer, lane, hidden, direct)
        return sums

    async def answer(self, request: Frame) -> Frame:
        """Take another worker's rows into a round; see ``messages.JoinRequest``.

        Raises:
            InvalidInput: the request is something else.
            StaleEpoch: this worker does not use the epoch.
            NotReady: it reaches other expert workers.
            MoesaicError: the round failed.
        """
        order, contribution = joining_rows(request, self._reach_of)
        now_s = asyncio.get_running_loop().time()
        self._recent.note(order.worker_id, order.lane, len(contribution.hidden), now_s)
        left_s = _DIRECT_S if self._mode == "direct" else self.steps.direct_until_s - now_s
        if left_s > 0:  # nothing is brought together; it need not wait to learn that
            return join_reply(request, JoinReply("direct", left_s))
        sums = await self._rounds.join(request.layer, contribution)
        if sums is None:  # the round goes directly, whatever else has become of the advice
            left_s = self.steps.direct_until_s - asyncio.get_running_loop().time()
            return join_reply(request, JoinReply("direct", max(0.0, left_s)))
        return join_reply(request, self._advice(contribution.members), sums)

    async def close(self) -> None:
        """Drop all links to neighbours; rounds that run fail."""
        await self._upkeep.close()
        await self._rounds.close()
        await self._joining.close()

    def _has_two_phases(self, nodes: Nodes) -> bool:
        """Tell if there is another node, and anything to bring together here or to hand on there."""
        if self._mode == "direct" or not nodes.others:
            return False
        return bool(self._joining.neighbours) or any(len(node) > 1 for node in nodes.others)

    def _nodes_of(self, reach: Reach, layer: int) -> Nodes:
        if reach is not self._reach:
            self._reach, self._nodes = reach, {}
        if layer not in self._nodes:
            self._nodes[layer] = Nodes.of(reach, reach.targets[layer], self._node)
        return self._nodes[layer]

    async def _in_two_phases(
        self, reach: Reach, layer: int, lane: int, hidden: Tensor, now_s: float
    ) -> Tensor | None:
        """Get sums with rows brought together; ``None`` if they should go directly, or something failed."""
        first = layer == min(reach.targets)
        lead = None
        if not self.steps.is_alone(lane, first, now_s):
            lead = self._joining.lead()
        if lead is None:
            nodes = self._nodes_of(reach, layer)
            if self._mode == "auto" and not self.steps.has_missed(lane, now_s):
                self._upkeep.see(reach, now_s)
            if not self._chooser.is_ready or (
                first and self._goes_directly(nodes, lane, hidden, now_s)
            ):
                return None
        if not self.steps.may_meet(lane, now_s):
            return None
        try:
            if lead is None:
                return await self._lead(reach, layer, lane, hidden, now_s)
            return await self._join(lead, reach, layer, lane, hidden, first)
        except MoesaicError as error:
            self.steps.direct_until_s = asyncio.get_running_loop().time() + _COOL_S
            metrics.FALLBACKS.labels(error.code).inc()
            log.warning("exchange.failed", layer=layer, cause=str(error))
            return None

    async def _lead(
        self, reach: Reach, layer: int, lane: int, hidden: Tensor, began_s: float
    ) -> Tensor | None:
        """Send these rows with those that neighbours join to them."""
        contribution = Contribution(self._worker_id, hidden, reach, lane)
        sums = await self._rounds.join(layer, contribution)
        if contribution.choice is not None and sums is not None:
            taken_s = asyncio.get_running_loop().time() - began_s
            metrics.note_seconds(contribution.choice, taken_s)
        return sums

    async def _join(
        self, lead: Link, reach: Reach, layer: int, lane: int, hidden: Tensor, first: bool
    ) -> Tensor | None:
        """Get the sums of these rows from the lead; ``None`` if that takes too long."""
        answer = await self._joining.join(
            lead,
            reach.placement.epoch,
            layer,
            lane,
            [hidden, reach.basis_of(layer)],
            first=first,
            patience_s=self._patience_s(len(hidden)),
        )
        if answer is None:
            return None
        sums, advice = answer
        self.steps.heed(advice, lane, asyncio.get_running_loop().time())
        return sums

    def _advice(self, members: int) -> JoinReply:
        """Advise a worker whose rows were in a round of so many workers."""
        now_s = asyncio.get_running_loop().time()
        left_s = self.steps.direct_until_s - now_s
        if left_s > 0:
            return JoinReply("direct", left_s)
        if members == 1:  # if this worker has steps of its own, the two will meet at the next one
            return JoinReply("alone", _ALONE_S if self.steps.is_idle(now_s) else 0.0)
        return JoinReply("offer")

    def _goes_directly(self, nodes: Nodes, lane: int, hidden: Tensor, now_s: float) -> bool:
        """Decide if the step that begins should go directly; then nobody is waited for."""
        if self._mode != "auto" or now_s < self.steps.direct_until_s:
            return False
        members, rows = self._recent.at(lane, len(hidden), now_s)
        if (
            self._chooser.choose(nodes.shape(members, rows, self._row_bytes(hidden))).way
            != "direct"
        ):
            return False
        self.steps.direct_until_s = now_s + _DIRECT_S
        self._rounds.pass_by(self._worker_id)
        return True

    async def _send(self, layer: int, members: Sequence[Contribution]) -> Tensor | None:
        """Send a round; ``None`` if its rows should rather go directly."""
        reach = members[0].reach
        nodes = Nodes.of(reach, reach.targets[layer], self._node)
        hidden = torch.cat([m.hidden for m in members]) if len(members) > 1 else members[0].hidden
        choice = self._chooser.choose(
            nodes.shape(members[0].members, len(hidden), self._row_bytes(hidden))
        )
        if choice.way == "direct":
            self.steps.direct_until_s = asyncio.get_running_loop().time() + _DIRECT_S
            return None
        patience_s = self._patience_s(len(hidden))
        sums = await self._sender.send(choice.way, reach, layer, nodes, hidden, patience_s)
        metrics.count_round(choice)
        for member in members:
            member.choice = choice
        return sums

    async def _directly(
        self, nodes: Nodes, layer: int, lane: int, hidden: Tensor, direct: Direct
    ) -> Tensor:
        """Ask without two phases; what that should take depends on the rows that others send."""
        began_s = asyncio.get_running_loop().time()
        sums = await direct()
        _count_direct(nodes)
        members, rows = self._recent.at(lane, len(hidden), began_s)
        choice = self._chooser.directly(nodes.shape(members, rows, self._row_bytes(hidden)))
        metrics.count_round(choice)
        metrics.note_seconds(choice, asyncio.get_running_loop().time() - began_s)
        return sums

    def _row_bytes(self, hidden: Tensor) -> int:
        return row_bytes(hidden.shape[1], hidden.dtype, self._wire)

    def _patience_s(self, rows: int) -> float:
        return self._timeout_s * max(1.0, rows / ROWS_PER_TIMEOUT)


def _count_direct(nodes: Nodes) -> None:
    metrics.MESSAGES.labels("intra").inc(2 * len(nodes.own))
    metrics.MESSAGES.labels("inter").inc(2 * sum(len(node) for node in nodes.others))
