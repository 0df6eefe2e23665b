"""The expert side of two phases: rows are handed on inside the node, and sums are added up there.

A relay asks its colleagues with frames of its own, so each ``ExpertHost`` answers as if it were asked
directly. Sums are added in the order of ``sum_order``, and only if all colleagues chose the same
experts and holders.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.sum_order import add_up
from moesaic.dispatch.two_phase.held_sums import HeldSums, Ticket
from moesaic.dispatch.two_phase.messages import (
    Collect,
    Hold,
    Reduce,
    Relay,
    encode,
    order_of,
    plain,
)
from moesaic.dispatch.two_phase.nodes import links_inside
from moesaic.dispatch.two_phase.sending import RELAY_SHARE
from moesaic.errors import ExpertUnavailable, InvalidInput, MoesaicError, StaleEpoch
from moesaic.experts.frames import partial_sum
from moesaic.experts.wire_rows import from_wire, is_sum_of
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame

REACH_SHARE = 0.5  # of a relay's time, at most, to find its colleagues


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
            worker_id: id of this worker.
            network: network that requests arrive on.
            compute: this worker's share of a request: ``ExpertHost.answer``.
            placement_of: the placement of an epoch, if this worker knows it.
        """
        self._worker_id, self._network = worker_id, network
        self._compute, self._placement_of = compute, placement_of
        self._links = links_inside(network)
        self._seq = itertools.count(1)
        self._holding = HeldSums()
        self._asking: set[asyncio.Future[list[Frame | MoesaicError]]] = set()

    def answer(self, request: Frame) -> Frame | Awaitable[Frame]:
        """Compute a request, or do for it what its body orders.

        Raises:
            FrameError: the body says nothing that an expert worker does.
            InvalidInput: it names workers that are not of this node.
            StaleEpoch: the epoch is not known here.
            ExpertUnavailable: colleagues chose differently, or a sum to be collected is not there.
            MoesaicError: the error that a colleague answered.
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
        raise InvalidInput("frame.body", "is not a command for an expert worker")

    def follow(self, placement: Placement | None) -> None:
        """Keep links only to colleagues of the placement in force."""
        workers = placement.workers if placement else []
        self._links.keep([Endpoint.of(worker) for worker in workers])

    async def close(self) -> None:
        """Drop all links to colleagues."""
        self._holding.close()
        await self._links.close()

    async def _relay(self, request: Frame, order: Relay) -> Frame:
        """``relay``: hand the rows on, compute the own share meanwhile, add up."""
        return await self._with_colleagues(request, order, request.tensors)

    async def _reduce(self, request: Frame, order: Reduce) -> Frame:
        """``reduce``: colleagues have the rows already; collect their sums."""
        return await self._with_colleagues(request, order, [])

    async def _with_colleagues(
        self, request: Frame, order: Relay | Reduce, tensors: list[Tensor]
    ) -> Frame:
        """Everybody's sum, within the budget from now on: finding colleagues is part of that."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + order.budget_s
        links = await self._colleagues(request, order.instances, REACH_SHARE * order.budget_s)
        left_s = until_s - loop.time()
        # A colleague with nothing to collect must say so before this end gives up: that costs the link.
        body = b""
        if isinstance(order, Reduce):
            body = encode(Collect(order.ticket, RELAY_SHARE * left_s))
        frame = replace(plain(request), tensors=tensors, body=body)
        calls = [(link, replace(frame, seq=next(self._seq))) for link in links.values()]
        asking = asyncio.ensure_future(self._network.exchange(calls, left_s))
        # To its end, whatever happens here: cancelling would cost links.
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        # Let the frames leave: computing holds up this event loop.
        await asyncio.sleep(0)
        own = self._compute(plain(request))
        outcomes = await asyncio.shield(asking)
        replies = {self._own_index(request): own}
        for idx, outcome in zip(links, outcomes, strict=True):
            if isinstance(outcome, MoesaicError):
                raise outcome
            replies[idx] = outcome
        return _sum_of(request, replies)

    def _hold(self, request: Frame, order: Hold) -> Frame:
        return self._holding.keep(
            _ticket(request, order), order.keep_s, lambda: self._compute(plain(request))
        )

    async def _collect(self, request: Frame, order: Collect) -> Frame:
        found = await self._holding.collect(_ticket(request, order), order.budget_s)
        if found is None:
            raise ExpertUnavailable(request.layer, cause=f"no rows came to {self._worker_id}")
        return request.reply(found.tensors, found.digest)

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
        reached = (self._links.reach(Endpoint.of(workers[idx]), deadline_s) for idx in others)
        return dict(zip(others, await asyncio.gather(*reached), strict=True))

    def _workers(self, request: Frame) -> list[PlacedWorker]:
        placement = self._placement_of(request.epoch)
        if placement is None:
            raise StaleEpoch(request.epoch, 0)
        return placement.workers

    def _own_index(self, request: Frame) -> int:
        names = [worker.worker_id for worker in self._workers(request)]
        return names.index(self._worker_id)


def _ticket(request: Frame, order: Hold | Collect) -> Ticket:
    return request.request_id, request.layer, order.ticket


def _sum_of(request: Frame, replies: dict[int, Frame]) -> Frame:
    if len({reply.digest for reply in replies.values()}) > 1:
        raise ExpertUnavailable(request.layer, cause="the node's workers chose differently")
    rows = request.tensors[0]
    parts = [part for idx in sorted(replies) for part in replies[idx].tensors[:1]]
    if len(parts) < len(replies) or not all(is_sum_of(part, rows, torch.float32) for part in parts):
        raise ExpertUnavailable(request.layer, cause="the node's sums have other shapes")
    sums = partial_sum(request, add_up([from_wire(part) for part in parts], len(rows)))
    digest = next(iter(replies.values())).digest
    return request.reply([sums], digest)
