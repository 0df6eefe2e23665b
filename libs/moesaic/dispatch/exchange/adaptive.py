"""How a layer's rows go to the experts and their sums come back: directly, or in two phases.

JANUS section 3.2. One of a node's attention workers, the first by worker id that can be reached,
brings the node's rows together (``gathering``, ``offering``) and sends them as one batch
(``sending``). Which way is the fastest is predicted from what links cost, and found out in trials that
all attention nodes make together (``judge``, ``attending``). Whatever goes wrong in two phases is
asked again directly: the layer is late, never wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog
import torch
from torch import Tensor

from moesaic.dispatch.exchange import metrics
from moesaic.dispatch.exchange.answering import Offered, answer_to
from moesaic.dispatch.exchange.attending import Attendance
from moesaic.dispatch.exchange.contacts import Contact
from moesaic.dispatch.exchange.costs import Case, LinkCosts
from moesaic.dispatch.exchange.gathering import Gathering, Offer
from moesaic.dispatch.exchange.judge import Judge, Mode, Question, Went
from moesaic.dispatch.exchange.offering import Offering
from moesaic.dispatch.exchange.orders import Verdict
from moesaic.dispatch.exchange.sending import Nodes, Reach, Sender
from moesaic.dispatch.exchange.steps import Company, Steps
from moesaic.dispatch.exchange.trials import Slot
from moesaic.errors import MoesaicError
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame

log = structlog.get_logger()

Direct = Callable[[], Awaitable[Tensor]]

MAX_ROWS = 8192  # of one round; half of what a frame may hold
ROWS_PER_TIMEOUT = 512  # a larger batch may take longer, in proportion
_DIRECT_S = 1.5  # before two phases are considered again, when they should be slower
_ALONE_S = 0.25  # before a worker that nobody joined offers its rows again to one without work
_COOL_S = 1.0  # before two phases are tried again after a failure


class _Directly(MoesaicError):
    """Nobody else's rows are there, and going directly should be faster."""


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
        self._worker_id, self._node, self._mode = worker_id, node, mode
        self._timeout_s, self._reach_of = timeout_s, reach_of
        self._sender, self._offering = Sender(network), Offering(network, worker_id)
        self._gathering, self._judge = Gathering(self._send, MAX_ROWS), Judge(mode)
        self._attendance = Attendance(network, worker_id, node, self._judge, self._offering.reach)
        self._reach: Reach | None = None
        self._nodes: dict[int, Nodes] = {}  # by layer, of ``_reach``
        self._steps = Steps()
        self._company = Company()

    @property
    def costs(self) -> LinkCosts | None:
        """What links cost; ``None`` before that is measured."""
        return self._judge.costs

    @property
    def is_settled(self) -> bool:
        """Whether it is known here which way is the fastest for the batches of late."""
        return self._attendance.is_settled

    def set_neighbours(self, neighbours: Sequence[Contact]) -> None:
        """Learn of the other attention workers on this node that gather rows."""
        if sorted(neighbours) == list(self._offering.neighbours):
            return
        self._offering.set_neighbours(neighbours)
        self._attendance.set_neighbours(self._offering.neighbours)
        self._gathering.keep({contact.worker_id for contact in neighbours} | {self._worker_id})

    async def dispatch(
        self, reach: Reach, layer: int, hidden: Tensor, direct: Direct, step_id: bytes = b""
    ) -> Tensor:
        """The sum of every row's experts, float32 ``[T, H]``.

        Args:
            reach: of the step's placement.
            layer: index of the decoder layer.
            hidden: ``[T, H]``, on the CPU.
            direct: asks the experts without two phases.
            step_id: of the step, which may have several batches under way.

        Raises:
            MoesaicError: what ``direct`` raises.
        """
        nodes, lane = self._nodes_of(reach, layer), self._steps.lane(step_id, layer)
        if not self._has_two_phases(nodes):
            _count_direct(nodes)
            return await direct()
        now_s = asyncio.get_running_loop().time()
        first, last = layer == min(reach.targets), layer == max(reach.targets)
        self._steps.reach(lane, now_s, first=first, last=last)
        alone = self._steps.is_alone(lane, first, now_s)
        gatherer = None if alone else self._offering.gatherer()
        if gatherer is None and self._mode == "auto" and not self._steps.has_missed(lane, now_s):
            self._attendance.see(reach, nodes, now_s, self._steps.step_s)
        ready = gatherer is not None or self._judge.is_ready
        if gatherer is None and first and ready and self._goes_directly(nodes, layer, lane, hidden):
            ready = False
        if ready and self._steps.may_meet(lane, now_s):
            try:
                if gatherer is None:
                    return await self._gather(reach, layer, lane, hidden, now_s)
                sums = await self._offer(gatherer, reach, layer, lane, hidden, first)
                if sums is not None:
                    return sums
            except _Directly:
                pass
            except MoesaicError as error:
                self._steps.direct_until_s = asyncio.get_running_loop().time() + _COOL_S
                metrics.FALLBACKS.labels(error.code).inc()
                log.warning("exchange.failed", layer=layer, cause=str(error))
        self._steps.go_directly(lane)
        return await self._directly(nodes, layer, lane, hidden, direct)

    async def answer(self, request: Frame) -> Frame:
        """Take another worker's rows into a round; see ``orders.Offer``.

        Raises:
            InvalidInput: the request is something else.
            StaleEpoch: this worker does not use the epoch.
            NotReady: it reaches other expert workers.
            MoesaicError: the exchange failed.
        """
        offered = Offered.read(request, self._reach_of)
        order, hidden = offered.order, offered.hidden
        now_s = asyncio.get_running_loop().time()
        self._company.note(order.worker_id, order.lane, len(hidden), now_s)
        left_s = _DIRECT_S if self._mode == "direct" else self._steps.direct_until_s - now_s
        if left_s > 0:  # nothing is brought together; it need not wait to learn that
            return answer_to(request, Verdict("direct", left_s))
        offer = Offer(order.worker_id, hidden, offered.reach, order.lane)
        sums = await self._gathering.join(request.layer, offer)
        return answer_to(request, self._verdict(offer.company), sums)

    async def close(self) -> None:
        """Drop all links to neighbours; rounds that run fail."""
        await self._attendance.close()
        await self._gathering.close()
        await self._offering.close()

    def _has_two_phases(self, nodes: Nodes) -> bool:
        """Whether there is another node, and anything to bring together here or to hand on there."""
        if self._mode == "direct" or not nodes.others:
            return False
        return bool(self._offering.neighbours) or any(len(node) > 1 for node in nodes.others)

    def _nodes_of(self, reach: Reach, layer: int) -> Nodes:
        if reach is not self._reach:
            self._reach, self._nodes = reach, {}
        if layer not in self._nodes:
            self._nodes[layer] = Nodes.of(reach, layer, self._node)
        return self._nodes[layer]

    async def _gather(
        self, reach: Reach, layer: int, lane: int, hidden: Tensor, began_s: float
    ) -> Tensor:
        """The sums of these rows, sent with those that neighbours offer."""
        slot = self._attendance.slot(began_s)
        offer = Offer(self._worker_id, hidden, reach, lane)
        sums = await self._gathering.join(layer, offer)
        self._learn(offer.went, began_s, slot)
        return sums

    async def _offer(
        self, gatherer: Link, reach: Reach, layer: int, lane: int, hidden: Tensor, first: bool
    ) -> Tensor | None:
        """The sums of these rows, from whoever gathers; ``None`` if that takes too long."""
        answer = await self._offering.offer(
            gatherer,
            reach.placement.epoch,
            layer,
            lane,
            [hidden, reach.terms_of(layer)],
            first=first,
            patience_s=self._patience_s(len(hidden)),
        )
        if answer is None:
            return None
        sums, verdict = answer
        self._steps.heed(verdict, lane, asyncio.get_running_loop().time())
        return sums

    def _verdict(self, company: int) -> Verdict:
        """What a worker whose rows were in a round with so many should do next."""
        now_s = asyncio.get_running_loop().time()
        if company == 1:  # if this worker has steps of its own, the two will meet at the next one
            return Verdict("alone", _ALONE_S if self._steps.is_idle(now_s) else 0.0)
        left_s = self._steps.direct_until_s - now_s
        return Verdict("direct", left_s) if left_s > 0 else Verdict("offer")

    def _goes_directly(self, nodes: Nodes, layer: int, lane: int, hidden: Tensor) -> bool:
        """Whether a step begins that should go directly; then nobody is waited for."""
        now_s = asyncio.get_running_loop().time()
        if self._mode != "auto" or now_s < self._steps.direct_until_s:
            return False
        members, rows = self._company.at(lane, len(hidden), now_s)
        question = Question.of(nodes, layer, members, rows, hidden)
        choice = self._judge.choose(question, self._attendance.slot(now_s))
        self._attendance.decided(now_s)
        if choice.case == "direct":
            self._rest(now_s)
            self._gathering.pass_by(self._worker_id)
        return choice.case == "direct"

    def _rest(self, now_s: float) -> None:
        """Go directly for a while, and let neighbours do so."""
        for_s = min(_DIRECT_S, self._attendance.changes_in_s(now_s))
        self._steps.direct_until_s = now_s + for_s

    async def _send(self, layer: int, offers: list[Offer]) -> Tensor:
        """Phase 2 of a round."""
        now_s, reach = asyncio.get_running_loop().time(), offers[0].reach
        nodes = Nodes.of(reach, layer, self._node)
        hidden = torch.cat([o.hidden for o in offers]) if len(offers) > 1 else offers[0].hidden
        own = [offer for offer in offers if offer.worker_id == self._worker_id]
        rows = len(hidden)
        if own:
            self._attendance.decided(now_s)
        question = Question.of(nodes, layer, offers[0].company, rows, hidden)
        choice = self._judge.choose(question, self._attendance.slot(now_s))
        case = choice.case
        if case == "direct":
            self._rest(now_s)
            if len(own) == len(offers):
                raise _Directly
            two_phases: tuple[Case, Case] = ("case-1", "case-2")
            case = min(two_phases, key=choice.predicted_s.__getitem__)  # once more, for who is here
        sums = await self._sender.send(case, reach, layer, nodes, hidden, self._patience_s(rows))
        went = Went(question, choice, case)
        self._judge.count(went)
        for offer in offers:
            offer.went = went
        return sums

    async def _directly(
        self, nodes: Nodes, layer: int, lane: int, hidden: Tensor, direct: Direct
    ) -> Tensor:
        """Ask without two phases, and learn what that takes in the usual company."""
        began_s = asyncio.get_running_loop().time()
        slot = self._attendance.slot(began_s)
        sums = await direct()
        _count_direct(nodes)
        members, rows = self._company.at(lane, len(hidden), began_s)
        question = Question.of(nodes, layer, members, rows, hidden)
        went = self._judge.directly(question, slot)
        self._judge.count(went)
        self._learn(went, began_s, slot)
        return sums

    def _learn(self, went: Went | None, began_s: float, slot: Slot | None) -> None:
        """Note how long this worker has waited for sums since ``began_s``, in that slot."""
        now_s = asyncio.get_running_loop().time()
        if went is not None:
            shown = slot if slot is not None and slot.settled else None
            self._judge.learn(went, now_s - began_s, shown, now_s)

    def _patience_s(self, rows: int) -> float:
        return self._timeout_s * max(1.0, rows / ROWS_PER_TIMEOUT)


def _count_direct(nodes: Nodes) -> None:
    metrics.MESSAGES.labels("intra").inc(2 * len(nodes.own))
    metrics.MESSAGES.labels("inter").inc(2 * sum(len(node) for node in nodes.others))
