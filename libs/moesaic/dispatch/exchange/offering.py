"""Phase 1, seen by a worker whose rows another one brings together."""

import asyncio
import itertools
import os
from collections.abc import Sequence

import structlog
from torch import Tensor

from moesaic.dispatch.exchange import metrics
from moesaic.dispatch.exchange.contacts import Contact, Contacts
from moesaic.dispatch.exchange.orders import Offer, Verdict, encode, order_of
from moesaic.errors import FrameError, MoesaicError
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

log = structlog.get_logger()

_STALL = 4.0  # times the usual trip; longer is not waited for who gathers
_LEAST_S, _FIRST_S, _UNKNOWN_S = 0.01, 0.1, 0.25  # at least; at a step's first layer; at first
_FADES = 0.8  # what a trip weighs after the next one
_GIVEN_UP = 3.0  # times what an exchange may take: then so is the link

_Asking = asyncio.Future[list[Frame | MoesaicError]]


class Offering:
    """Offers rows to the first of the node's attention workers. Lives on the engine's event loop."""

    def __init__(self, network: Network, worker_id: str) -> None:
        """Offer over ``network`` what ``worker_id`` has."""
        self._network, self._worker_id = network, worker_id
        self._contacts = Contacts(network)
        self._neighbours: list[Contact] = []
        self._seq = itertools.count(1)
        self._trip_s: dict[int, float] = {}  # by the size of the batch
        self._asking: set[_Asking] = set()
        self._overdue: set[_Asking] = set()  # of these, those that are waited for no more

    @property
    def neighbours(self) -> Sequence[Contact]:
        """The others on this node, by worker id."""
        return self._neighbours

    def set_neighbours(self, neighbours: Sequence[Contact]) -> None:
        """Learn who else is on this node; links to others end."""
        self._neighbours = sorted(neighbours)
        self._contacts.keep(self._neighbours)

    async def reach(self, contact: Contact, deadline_s: float) -> Link:
        """A link to a neighbour; raises ``PeerLost`` if there is none in time."""
        return await self._contacts.reach(contact, deadline_s)

    def gatherer(self) -> Link | None:
        """Who brings the node's rows together; ``None``: this worker, until an earlier one is linked."""
        for contact in self._neighbours:
            if contact.worker_id > self._worker_id:
                break
            if (link := self._contacts.link(contact)) is not None:
                return link
        return None

    async def offer(
        self,
        gatherer: Link,
        epoch: int,
        layer: int,
        lane: int,
        tensors: list[Tensor],
        *,
        first: bool,
        patience_s: float,
    ) -> tuple[Tensor | None, Verdict] | None:
        """The sums of these rows, none if they should go directly, and what to do next; ``None`` if it
        takes unusually long.

        Whoever gathers may be computing and cannot answer then. It is asked again when it has
        answered, and what it answers late reaches nobody.

        Args:
            gatherer: from ``gatherer()``.
            epoch: of the step's placement.
            layer: index of the decoder layer, ``first`` of the step or not.
            lane: number of the batch among those of the step.
            tensors: of the request.
            first: see ``layer``.
            patience_s: what an exchange may take; the link is given up long after that.

        Raises:
            MoesaicError: what it answered, or why there was no answer.
        """
        if self._overdue:
            return None
        loop = asyncio.get_running_loop()
        size, started = len(tensors[0]).bit_length(), loop.time()
        request = Frame(
            kind=FrameKind.REQUEST,
            request_id=os.urandom(16),
            epoch=epoch,
            layer=layer,
            seq=next(self._seq),
            tensors=tensors,
            body=encode(Offer(self._worker_id, lane)),
        )
        deadline_s = _GIVEN_UP * patience_s
        asking = asyncio.ensure_future(self._network.exchange([(gatherer, request)], deadline_s))
        asking.add_done_callback(lambda done: self._answered(done, size, loop.time() - started))
        self._asking.add(asking)  # not cancelled with the step: that would cost the link
        least_s = _FIRST_S if first else _LEAST_S
        stall_s = max(least_s, _STALL * self._trip_s.get(size, _UNKNOWN_S / _STALL))
        await asyncio.wait({asking}, timeout=min(stall_s, patience_s))
        if not asking.done():
            self._overdue.add(asking)
            metrics.FALLBACKS.labels("stalled").inc()
            log.debug("exchange.stalled", gatherer=gatherer.peer, layer=layer)
            return None
        [outcome] = asking.result()
        if isinstance(outcome, MoesaicError):
            raise outcome
        verdict = order_of(outcome)
        if not isinstance(verdict, Verdict):
            raise FrameError("body", "must be a verdict")
        if verdict.next == "direct" and not outcome.tensors:
            return None, verdict
        if not outcome.tensors or outcome.tensors[0].shape != tensors[0].shape:
            raise FrameError("tensors", "sums have another shape")
        return outcome.tensors[0], verdict

    async def close(self) -> None:
        """Drop all links."""
        asking = list(self._asking)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._contacts.close()

    def _answered(self, asking: _Asking, size: int, seconds: float) -> None:
        self._asking.discard(asking)
        self._overdue.discard(asking)
        if asking.cancelled() or isinstance(asking.result()[0], MoesaicError):
            return  # says nothing about trips
        known = self._trip_s.get(size, seconds)
        self._trip_s[size] = _FADES * known + (1 - _FADES) * seconds
