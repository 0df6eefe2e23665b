"""How a layer's rows go to the experts and their sums come back: directly, or in two phases.

JANUS section 3.2. One of a node's attention workers, the first by worker id that can be reached,
brings the node's rows together (``gathering``, ``offering``) and sends them as one batch
(``sending``). Which way is the fastest is predicted from what links cost and learned from what
exchanges take (``costs``, ``choice``). Whatever goes wrong in two phases is asked again directly: the
layer is late, never wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog
import torch
from torch import Tensor

from moesaic.dispatch.exchange import metrics
from moesaic.dispatch.exchange.choice import Choice
from moesaic.dispatch.exchange.contacts import Contact
from moesaic.dispatch.exchange.costs import Case, LinkCosts
from moesaic.dispatch.exchange.gathering import Gathering, Offer
from moesaic.dispatch.exchange.judge import Judge, Mode, Question
from moesaic.dispatch.exchange.offering import Offering
from moesaic.dispatch.exchange.orders import Offer as OfferOrder
from moesaic.dispatch.exchange.orders import Verdict, encode, order_of
from moesaic.dispatch.exchange.sending import Nodes, Reach, Sender
from moesaic.errors import InvalidInput, MoesaicError, NotReady, StaleEpoch
from moesaic.transport.contract import Network
from moesaic.transport.frame import Frame, FrameKind

log = structlog.get_logger()

Direct = Callable[[], Awaitable[Tensor]]

MAX_ROWS = 8192  # of one round; half of what a frame may hold
ROWS_PER_TIMEOUT = 512  # a larger batch may take longer, in proportion
_DIRECT_S = 0.5  # before two phases are considered again, when they should be slower
_EXPLORE_S = 0.05  # the same, when going directly was only tried
_ALONE_S = 0.25  # before a worker that nobody joined offers its rows again
_COOL_S = 1.0  # before two phases are tried again after a failure


class _Directly(MoesaicError):
    """Nobody has joined, and going directly should be faster."""


class AdaptiveExchange:
    """Exchanges rows for sums. Lives on the engine thread's event loop."""

    def __init__(
        self,
        network: Network,
        worker_id: str,
        node: str,
        mode: Mode,
        timeout_s: float,
        reach_of: Callable[[int], Reach | None],
    ) -> None:
        """Exchange over ``network``.

        Args:
            network: of this engine thread.
            worker_id: of this attention worker.
            node: that it is on.
            mode: the way to go, or ``auto``: the one that should be the fastest.
            timeout_s: longest wait for the sums of up to 512 rows; in proportion for more.
            reach_of: what of an epoch's placement can be reached now, if that epoch is in use.
        """
        self._network, self._worker_id, self._node = network, worker_id, node
        self._mode, self._timeout_s, self._reach_of = mode, timeout_s, reach_of
        self._sender, self._offering = Sender(network), Offering(network, worker_id)
        self._gathering = Gathering(self._send, MAX_ROWS)
        self._judge = Judge(mode)
        self._reach: Reach | None = None
        self._to_measure = False  # the links of ``_reach``
        self._nodes: dict[int, Nodes] = {}  # by layer, of ``_reach``
        self._measuring: asyncio.Task[None] | None = None
        self._direct_until = self._alone_until = 0.0
        self._alone = False  # nobody has joined when rows were offered last
        self._company = (1, 1.0)  # workers in the last round, and its rows for each of ours

    @property
    def costs(self) -> LinkCosts | None:
        """What links cost; ``None`` before that is measured."""
        return self._judge.costs

    def set_neighbours(self, neighbours: Sequence[Contact]) -> None:
        """Learn of the other attention workers on this node that gather rows."""
        if sorted(neighbours) == list(self._offering.neighbours):
            return
        self._offering.set_neighbours(neighbours)
        known = {contact.worker_id for contact in neighbours} | {self._worker_id}
        for gone in self._gathering.regulars - known:
            self._gathering.leave(gone)
        self._reach = None  # there are other links to measure

    async def dispatch(self, reach: Reach, layer: int, hidden: Tensor, direct: Direct) -> Tensor:
        """The sum of every row's experts, float32 ``[T, H]``.

        Args:
            reach: of the step's placement.
            layer: index of the decoder layer.
            hidden: ``[T, H]``, on the CPU.
            direct: asks the experts without two phases.

        Raises:
            MoesaicError: what ``direct`` raises.
        """
        nodes = self._nodes_of(reach, layer)
        if not self._has_two_phases(nodes):
            _count_direct(nodes)
            return await direct()
        now = asyncio.get_running_loop().time()
        if now >= self._direct_until and self._judge.is_ready:
            try:
                sums = await self._in_two_phases(reach, layer, hidden, now)
                if sums is not None:
                    return sums
            except _Directly:
                pass
            except MoesaicError as error:
                self._direct_until = asyncio.get_running_loop().time() + _COOL_S
                metrics.FALLBACKS.labels(error.code).inc()
                log.warning("exchange.failed", layer=layer, cause=str(error))
        return await self._directly(reach, nodes, layer, hidden, direct)

    async def answer(self, request: Frame) -> Frame:
        """Take another worker's rows into a round; see ``orders.Offer``.

        Raises:
            InvalidInput: the request is something else.
            StaleEpoch: this worker does not use the epoch.
            NotReady: it reaches other expert workers.
            MoesaicError: the exchange failed.
        """
        order = order_of(request)
        if not isinstance(order, OfferOrder) or len(request.tensors) != 2:
            raise InvalidInput("frame.body", "must offer rows")
        reach = self._reach_of(request.epoch)
        if reach is None:
            raise StaleEpoch(request.epoch, 0)
        hidden, terms = request.tensors
        known = request.layer in reach.targets
        if not (known and torch.equal(terms, reach.terms_of(request.layer))):
            raise NotReady("this worker reaches other expert workers")
        offer = Offer(order.worker_id, hidden, reach)
        sums = await self._gathering.join(request.layer, offer)
        return Frame(
            kind=FrameKind.REPLY,
            request_id=request.request_id,
            epoch=request.epoch,
            layer=request.layer,
            seq=request.seq,
            tensors=[sums],
            body=encode(self._verdict(offer.company)),
        )

    async def close(self) -> None:
        """Drop all links to neighbours; rounds that run fail."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)
        await self._gathering.close()
        await self._offering.close()

    def _has_two_phases(self, nodes: Nodes) -> bool:
        """Whether there is another node, and anything to bring together here or to hand on there."""
        if self._mode == "direct" or not nodes.others:
            return False
        return bool(self._offering.neighbours) or any(len(node) > 1 for node in nodes.others)

    def _nodes_of(self, reach: Reach, layer: int) -> Nodes:
        if reach is not self._reach:
            self._reach, self._nodes, self._to_measure = reach, {}, True
        if layer not in self._nodes:
            nodes = self._nodes[layer] = Nodes.of(reach, layer, self._node)
            if self._to_measure and self._has_two_phases(nodes):
                self._to_measure = False
                self._measure_soon(reach, nodes)
        return self._nodes[layer]

    async def _in_two_phases(
        self, reach: Reach, layer: int, hidden: Tensor, now: float
    ) -> Tensor | None:
        """The sums; ``None`` if whoever gathers takes too long."""
        gatherer, first = self._offering.gatherer(), layer == min(reach.targets)
        if gatherer is None or now < self._alone_until or (self._alone and not first):
            offer = Offer(self._worker_id, hidden, reach)
            return await self._gathering.join(layer, offer)
        answer = await self._offering.offer(
            gatherer,
            reach.placement.epoch,
            layer,
            [hidden, reach.terms_of(layer)],
            first=first,
            deadline_s=3 * self._patience_s(len(hidden)),
        )
        if answer is None:
            return None
        sums, verdict = answer
        until = asyncio.get_running_loop().time() + verdict.for_s
        self._alone = verdict.next == "alone"
        if self._alone:
            self._alone_until = until
        elif verdict.next == "direct":
            self._direct_until = until
        return sums

    def _verdict(self, company: int) -> Verdict:
        """What a worker whose rows were in a round with so many should do next."""
        if company == 1:
            return Verdict("alone", _ALONE_S)
        left_s = self._direct_until - asyncio.get_running_loop().time()
        return Verdict("direct", left_s) if left_s > 0 else Verdict("offer")

    async def _send(self, layer: int, offers: list[Offer], opened_s: float) -> Tensor:
        """Phase 2 of a round."""
        loop, reach = asyncio.get_running_loop(), offers[0].reach
        nodes = Nodes.of(reach, layer, self._node)
        rows = sum(len(offer.hidden) for offer in offers)
        own_rows = sum(len(o.hidden) for o in offers if o.worker_id == self._worker_id)
        self._company = (len(offers), rows / own_rows if own_rows else 1.0)
        question = Question.of(reach, layer, nodes, len(offers), rows, offers[0].hidden)
        choice = self._judge.choose(question)
        case = choice.case
        if case == "direct":
            if own_rows:
                self._direct_until = loop.time() + (_EXPLORE_S if choice.exploring else _DIRECT_S)
            if own_rows == rows:
                raise _Directly
            two_phases: tuple[Case, Case] = ("case-1", "case-2")
            case = min(two_phases, key=choice.predicted_s.__getitem__)  # once more, for who is here
        hidden = torch.cat([o.hidden for o in offers]) if len(offers) > 1 else offers[0].hidden
        patience_s = self._patience_s(rows)
        sums = await self._sender.send(case, reach, layer, nodes, hidden, patience_s)
        self._judge.learn(question, case, choice, loop.time() - opened_s)
        return sums

    async def _directly(
        self, reach: Reach, nodes: Nodes, layer: int, hidden: Tensor, direct: Direct
    ) -> Tensor:
        """Ask without two phases, and learn what that takes in the usual company."""
        started = asyncio.get_running_loop().time()
        sums = await direct()
        taken_s = asyncio.get_running_loop().time() - started
        _count_direct(nodes)
        members, ratio = self._company
        rows = round(len(hidden) * ratio)
        question = Question.of(reach, layer, nodes, members, rows, hidden)
        choice = Choice("direct", self._judge.predict(question))
        self._judge.learn(question, "direct", choice, taken_s)
        return sums

    def _patience_s(self, rows: int) -> float:
        return self._timeout_s * max(1.0, rows / ROWS_PER_TIMEOUT)

    def _measure_soon(self, reach: Reach, nodes: Nodes) -> None:
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.ensure_future(self._measure(reach, nodes))

    async def _measure(self, reach: Reach, nodes: Nodes) -> None:
        """Learn what links cost, over the links there are."""
        try:
            near = [
                await self._offering.reach(contact, self._timeout_s)
                for contact in self._offering.neighbours[:1]
            ]
            await self._judge.measure(self._network, reach, nodes, near)
        except MoesaicError as error:
            log.warning("links.not_measured", cause=str(error))
            await asyncio.sleep(_COOL_S)
            self._reach = None  # with the next step, again


def _count_direct(nodes: Nodes) -> None:
    metrics.MESSAGES.labels("intra").inc(2 * len(nodes.own))
    metrics.MESSAGES.labels("inter").inc(2 * sum(len(node) for node in nodes.others))
