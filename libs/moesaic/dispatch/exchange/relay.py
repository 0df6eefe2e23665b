"""The expert side of an exchange: rows are handed on inside the node, and sums are added up there.

Everything is asked of an ``ExpertHost`` in the end; what this adds is who asks. A relay asks its
colleagues with frames of its own, so each answers as if it were asked directly. Sums are added in the
order of ``order``, and only if all colleagues chose the same experts and holders.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import torch
from torch import Tensor

from moesaic.dispatch.exchange.contacts import Contact, Contacts
from moesaic.dispatch.exchange.costs import slowest
from moesaic.dispatch.exchange.measure import measure_link
from moesaic.dispatch.exchange.order import add_up, is_part
from moesaic.dispatch.exchange.orders import (
    Collect,
    Hold,
    Measure,
    Reduce,
    Relay,
    encode,
    order_of,
)
from moesaic.errors import ExpertUnavailable, InvalidInput, MoesaicError, Overloaded, StaleEpoch
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

HELD_S = 10.0  # for a sum to be collected
MAX_HELD = 1024

_Ticket = tuple[bytes, int, int]  # step, layer, and what tells the sender's exchanges apart


class ExpertRelay:
    """Answers for its node. Lives on the engine thread's event loop."""

    def __init__(
        self,
        worker_id: str,
        network: Network,
        compute: Callable[[Frame], Frame],
        placement_of: Callable[[int], Placement | None],
    ) -> None:
        """Relay to colleagues over ``network``.

        Args:
            worker_id: of this worker.
            network: that requests arrive on.
            compute: this worker's share of a request: ``ExpertHost.answer``.
            placement_of: the placement of an epoch, if this worker knows it.
        """
        self._worker_id, self._network = worker_id, network
        self._compute, self._placement_of = compute, placement_of
        self._contacts = Contacts(network)
        self._seq = itertools.count(1)
        self._held: dict[_Ticket, asyncio.Future[Frame]] = {}
        self._asking: set[asyncio.Future[list[Frame | MoesaicError]]] = set()

    def answer(self, request: Frame) -> Frame | Awaitable[Frame]:
        """Compute a request, or do for it what its body orders.

        Raises:
            FrameError: the body says nothing that an expert worker does.
            InvalidInput: it names workers that are not of this node.
            StaleEpoch: the epoch is not known here.
            ExpertUnavailable: colleagues chose differently, or a sum to be collected is not there.
            MoesaicError: whatever a colleague answered.
        """
        order = order_of(request)
        if order is None:
            return self._compute(request)
        if isinstance(order, Relay):
            return self._relay(request, order)
        if isinstance(order, Reduce):
            return self._reduce(request, order)
        if isinstance(order, Hold):
            return self._hold(request, order)
        if isinstance(order, Collect):
            return self._collect(request, order)
        if isinstance(order, Measure):
            return self._measure(request, order)
        raise InvalidInput("frame.body", "is no order for an expert worker")

    def follow(self, placement: Placement | None) -> None:
        """Keep links only to colleagues of the placement in force."""
        workers = placement.workers if placement else []
        self._contacts.keep([_contact(worker) for worker in workers])

    async def close(self) -> None:
        """Drop all links to colleagues."""
        for held in self._held.values():
            held.cancel()
        await self._contacts.close()

    async def _relay(self, request: Frame, order: Relay) -> Frame:
        """Case 2: hand the rows on, compute the own share meanwhile, add up."""
        links = await self._colleagues(request, order.instances, order.budget_s)
        calls = [(link, self._to_colleague(request, request.tensors)) for link in links.values()]
        return await self._with_colleagues(request, list(links), calls, order.budget_s)

    async def _reduce(self, request: Frame, order: Reduce) -> Frame:
        """Case 1: colleagues have the rows already; collect their sums."""
        links = await self._colleagues(request, order.instances, order.budget_s)
        body = encode(Collect(order.ticket, order.budget_s))
        calls = [(link, self._to_colleague(request, [], body)) for link in links.values()]
        return await self._with_colleagues(request, list(links), calls, order.budget_s)

    async def _with_colleagues(
        self,
        request: Frame,
        colleagues: Sequence[int],
        calls: Sequence[tuple[Link, Frame]],
        budget_s: float,
    ) -> Frame:
        asking = asyncio.ensure_future(self._network.exchange(calls, budget_s))
        self._asking.add(asking)  # to its end, whatever happens here: cancelling would cost links
        asking.add_done_callback(self._asking.discard)
        await asyncio.sleep(0)  # let the frames leave: computing holds up this event loop
        own = self._compute(_plain(request))
        outcomes = await asyncio.shield(asking)
        replies = {self._own_index(request): own}
        for idx, outcome in zip(colleagues, outcomes, strict=True):
            if isinstance(outcome, MoesaicError):
                raise outcome
            replies[idx] = outcome
        return _sum_of(request, replies)

    def _hold(self, request: Frame, order: Hold) -> Frame:
        held = self._ticket((request.request_id, request.layer, order.ticket))
        try:
            reply = self._compute(_plain(request))
        except MoesaicError as error:
            if not held.done():
                held.set_exception(error)
                held.exception()  # nobody may come for it
            raise
        if not held.done():
            held.set_result(reply)
        return reply

    async def _collect(self, request: Frame, order: Collect) -> Frame:
        ticket = (request.request_id, request.layer, order.ticket)
        held = self._ticket(ticket)
        try:
            await asyncio.wait({held}, timeout=order.budget_s)
            if not held.done() or held.cancelled():
                raise ExpertUnavailable(request.layer, cause=f"no rows came to {self._worker_id}")
            found = held.result()
        finally:
            self._held.pop(ticket, None)
        return _reply(request, found.tensors, found.digest)

    def _ticket(self, ticket: _Ticket) -> "asyncio.Future[Frame]":
        """What is held under this ticket, now or soon: rows and collector come in any order."""
        held = self._held.get(ticket)
        if held is None:
            if len(self._held) >= MAX_HELD:
                raise Overloaded(f"{MAX_HELD} sums wait to be collected", 0.1)
            loop = asyncio.get_running_loop()
            held = self._held[ticket] = loop.create_future()
            loop.call_later(HELD_S, self._held.pop, ticket, None)
        return held

    async def _measure(self, request: Frame, order: Measure) -> Frame:
        links = await self._colleagues(request, order.instances, HELD_S)
        if not links:
            raise InvalidInput("frame.body", "must name a colleague")
        reply = _reply(request, [], 0)
        found = [await measure_link(link) for link in links.values()]
        reply.body = msgspec.msgpack.encode(slowest(found))
        return reply

    async def _colleagues(
        self, request: Frame, instances: Sequence[int], deadline_s: float
    ) -> dict[int, Link]:
        """Links to the others among ``instances``, by index, in ascending order."""
        workers = self._workers(request)
        own = self._own_index(request)
        if own not in instances or not all(0 <= idx < len(workers) for idx in instances):
            raise InvalidInput("frame.body", f"must name worker {own} of {len(workers)}")
        others = [idx for idx in sorted(set(instances)) if idx != own]
        if any(workers[idx].node_name != workers[own].node_name for idx in others):
            raise InvalidInput("frame.body", f"must name workers of {workers[own].node_name}")
        return {
            idx: await self._contacts.reach(_contact(workers[idx]), deadline_s) for idx in others
        }

    def _workers(self, request: Frame) -> list[PlacedWorker]:
        placement = self._placement_of(request.epoch)
        if placement is None:
            raise StaleEpoch(request.epoch, 0)
        return placement.workers

    def _own_index(self, request: Frame) -> int:
        names = [worker.worker_id for worker in self._workers(request)]
        return names.index(self._worker_id)

    def _to_colleague(self, request: Frame, tensors: list[Tensor], body: bytes = b"") -> Frame:
        return Frame(
            kind=FrameKind.REQUEST,
            request_id=request.request_id,
            epoch=request.epoch,
            layer=request.layer,
            seq=next(self._seq),
            threshold=request.threshold,
            flags=request.flags,
            tensors=tensors,
            body=body,
        )


def _plain(request: Frame) -> Frame:
    """The request as if it had been made directly."""
    return Frame(
        kind=FrameKind.REQUEST,
        request_id=request.request_id,
        epoch=request.epoch,
        layer=request.layer,
        seq=request.seq,
        threshold=request.threshold,
        flags=request.flags,
        tensors=request.tensors,
    )


def _sum_of(request: Frame, replies: dict[int, Frame]) -> Frame:
    if len({reply.digest for reply in replies.values()}) > 1:
        raise ExpertUnavailable(request.layer, cause="the node's workers chose differently")
    hidden = request.tensors[0]
    parts = [part for idx in sorted(replies) for part in replies[idx].tensors[:1]]
    if len(parts) < len(replies) or not all(is_part(part, hidden) for part in parts):
        raise ExpertUnavailable(request.layer, cause="the node's sums have other shapes")
    sums = add_up(parts, len(hidden))
    reply = _reply(request, [sums], next(iter(replies.values())).digest)
    reply.flags = len(parts)  # so that nobody takes a part for the sum
    return reply


def _reply(request: Frame, tensors: list[torch.Tensor], digest: int) -> Frame:
    return Frame(
        kind=FrameKind.REPLY,
        request_id=request.request_id,
        epoch=request.epoch,
        layer=request.layer,
        seq=request.seq,
        digest=digest,
        tensors=tensors,
    )


def _contact(worker: PlacedWorker) -> Contact:
    return Contact(worker.worker_id, worker.generation, worker.data_address)
