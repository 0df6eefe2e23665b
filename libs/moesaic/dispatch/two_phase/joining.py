"""Phase 1, seen by workers whose rows another one brings together, and the frames of both sides."""

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.route import Route
from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.messages import JoinReply, JoinRequest, encode, order_of
from moesaic.dispatch.two_phase.nodes import links_inside
from moesaic.dispatch.two_phase.rounds import Contribution
from moesaic.errors import FrameError, InvalidInput, MoesaicError, NotReady, StaleEpoch
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

log = structlog.get_logger()

_GIVEN_UP = 3.0  # times what a layer may take: then so is the link
_STALL = 4.0  # times the usual trip; the lead is waited for no longer
_LEAST_S, _FIRST_S, _UNKNOWN_S = 0.01, 0.1, 0.25  # at least; at a step's first layer; at first
_FADES = 0.8  # what a trip weighs after the next one

_Asking = asyncio.Future[list[Frame | MoesaicError]]


class TripTimes:
    """Times of trips to the lead and back, by the size of the batch in powers of two. Pure."""

    def __init__(self) -> None:
        self._usual_s: dict[int, float] = {}  # by size

    def usual_s(self, rows: int) -> float | None:
        """Recent seconds of trips of this number of rows; ``None`` before the first one."""
        return self._usual_s.get(rows.bit_length())

    def patience_s(self, rows: int, *, first: bool) -> float:
        """Seconds that a trip is waited for, at a step's ``first`` layer or another."""
        usual_s = self.usual_s(rows)
        stall_s = _UNKNOWN_S if usual_s is None else _STALL * usual_s
        return max(_FIRST_S if first else _LEAST_S, stall_s)

    def took(self, rows: int, seconds: float) -> None:
        """Note a trip that brought sums."""
        known = self._usual_s.get(rows.bit_length(), seconds)
        self._usual_s[rows.bit_length()] = _FADES * known + (1 - _FADES) * seconds


class Joining:
    """Joins rows to those of the node's lead. Lives on the engine's event loop.

    Attributes:
        trips: times of the trips.
    """

    def __init__(self, network: Network, worker_id: str) -> None:
        """Join over ``network``, in the name of ``worker_id``."""
        self._network, self._worker_id = network, worker_id
        self.trips = TripTimes()
        self._links = links_inside(network)
        self._neighbours: list[Endpoint] = []
        self._seq = itertools.count(1)
        self._asking: set[_Asking] = set()
        self._overdue: set[_Asking] = set()  # of these, those that are waited for no more

    @property
    def neighbours(self) -> Sequence[Endpoint]:
        """The others on this node, by worker id."""
        return self._neighbours

    def set_neighbours(self, neighbours: Sequence[Endpoint]) -> None:
        """Learn of the others on this node; links to anybody else end."""
        self._neighbours = sorted(neighbours)
        self._links.keep(self._neighbours)

    def lead(self) -> Link | None:
        """Find the lead: the worker that brings the node's rows together.

        Returns:
            The link to it; ``None`` if that is this worker, or no earlier one is linked yet.
        """
        for neighbour in self._neighbours:
            if neighbour.worker_id > self._worker_id:
                break
            if (link := self._links.dial(neighbour)) is not None:
                return link
        return None

    async def join(
        self,
        lead: Link,
        epoch: int,
        layer: int,
        tensors: list[Tensor],
        *,
        first: bool,
        patience_s: float,
    ) -> tuple[Tensor | None, JoinReply] | None:
        """Ask for the sums of these rows.

        The lead may be computing, and cannot answer then. It is asked again once it has answered; what it
        answers too late is dropped.

        Args:
            lead: from ``lead()``.
            epoch: of the step's placement.
            layer: index of the decoder layer, ``first`` of the step or not.
            tensors: of the request.
            first: see ``layer``.
            patience_s: what a layer may take; the link is given up long after that.

        Returns:
            The sums, none if the rows should go directly, with advice for the next ones; ``None`` if
            it takes unusually long.

        Raises:
            MoesaicError: what it answered, or why there was no answer.
        """
        if self._overdue:
            return None
        loop = asyncio.get_running_loop()
        rows, started = len(tensors[0]), loop.time()
        request = Frame(
            kind=FrameKind.REQUEST,
            request_id=os.urandom(16),
            epoch=epoch,
            layer=layer,
            seq=next(self._seq),
            tensors=tensors,
            body=encode(JoinRequest(self._worker_id)),
        )
        deadline_s = _GIVEN_UP * patience_s
        asking = asyncio.ensure_future(self._network.exchange([(lead, request)], deadline_s))
        asking.add_done_callback(lambda done: self._answered(done, rows, loop.time() - started))
        # Not cancelled with the step: that would cost the link.
        self._asking.add(asking)
        stall_s = self.trips.patience_s(rows, first=first)
        await asyncio.wait({asking}, timeout=min(stall_s, patience_s))
        if not asking.done():
            self._overdue.add(asking)
            metrics.FALLBACKS.labels("stalled").inc()
            log.debug("exchange.stalled", lead=lead.peer, layer=layer)
            return None
        [outcome] = asking.result()
        if isinstance(outcome, MoesaicError):
            raise outcome
        return _sums_and_advice(outcome, tensors[0])

    async def close(self) -> None:
        """Drop all links."""
        asking = list(self._asking)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._links.close()

    def _answered(self, asking: _Asking, rows: int, seconds: float) -> None:
        self._asking.discard(asking)
        self._overdue.discard(asking)
        if asking.cancelled():
            return
        [outcome] = asking.result()
        # An error says nothing about trips, nor does advice without sums, which may come at once.
        if isinstance(outcome, Frame) and outcome.tensors:
            self.trips.took(rows, seconds)


def joining_rows(request: Frame, route_of: Callable[[int], Route | None]) -> Contribution:
    """Read the rows that another worker joins to ours.

    Raises:
        InvalidInput: the request is something else.
        StaleEpoch: this worker does not use the epoch.
        NotReady: it reaches other expert workers.
    """
    order = order_of(request)
    if not isinstance(order, JoinRequest) or len(request.tensors) != 2:
        raise InvalidInput("frame.body", "must join rows")
    route = route_of(request.epoch)
    if route is None:
        raise StaleEpoch(request.epoch, 0)
    hidden, basis = request.tensors
    # Without the batches under way, which differ from worker to worker.
    known = request.layer in route.targets
    if not (known and torch.equal(basis, route.encoded[request.layer])):
        raise NotReady("this worker reaches other expert workers")
    return Contribution(order.worker_id, hidden, route)


def join_reply(request: Frame, advice: JoinReply, sums: Tensor | None = None) -> Frame:
    """Make the reply: sums of the rows, or none, and advice for the next ones."""
    return request.reply(tensors=[] if sums is None else [sums], body=encode(advice))


def _sums_and_advice(reply: Frame, hidden: Tensor) -> tuple[Tensor | None, JoinReply]:
    advice = order_of(reply)
    if not isinstance(advice, JoinReply):
        raise FrameError("body", "must advise")
    if advice.next == "direct" and not reply.tensors:
        return None, advice
    if not reply.tensors or reply.tensors[0].shape != hidden.shape:
        raise FrameError("tensors", "sums have another shape")
    return reply.tensors[0], advice
