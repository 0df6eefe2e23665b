"""Phase 2: one batch of rows to the expert nodes, one sum back from each."""

import itertools
import os
from collections.abc import Sequence

from torch import Tensor

from moesaic.dispatch.route import Route
from moesaic.dispatch.sum_order import add_up
from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.messages import Hold, Reduce, Relay, encode
from moesaic.dispatch.two_phase.nodes import Nodes
from moesaic.dispatch.two_phase.way import Way
from moesaic.errors import ExpertUnavailable, MoesaicError
from moesaic.experts.wire_rows import from_wire, is_sum_of, to_wire
from moesaic.messages.wire import WireDtype
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

RELAY_SHARE = 0.7  # of the time for a round: a relay must give up on colleagues before we do
FIRST_SEQ = 1 << 61  # apart from frames that go directly over the same links at the same time


class Sender:
    """Asks expert nodes. Lives on the event loop of ``network``."""

    def __init__(self, network: Network, wire: WireDtype) -> None:
        self._network, self._wire = network, wire
        self._seq, self._tickets, self._turn = itertools.count(FIRST_SEQ), itertools.count(1), 0

    async def send(
        self,
        way: Way,
        route: Route,
        layer: int,
        nodes: Nodes,
        hidden: Tensor,
        deadline_s: float,
    ) -> Tensor:
        """Send rows one way.

        Workers of the own node, and one that is alone on its node, are asked directly.

        Returns:
            The sum for every row of ``hidden``, float32 ``[T, H]``, in the order of ``sum_order``.

        Raises:
            MoesaicError: somebody failed; nothing is known of the sum.
        """
        self._turn += 1
        # Rows of several steps may be in it.
        step_id = os.urandom(16)
        rows = to_wire(hidden, self._wire)

        def frame(body: bytes = b"", kind: FrameKind = FrameKind.REQUEST) -> Frame:
            return Frame(
                kind=kind,
                request_id=step_id,
                epoch=route.placement.epoch,
                layer=layer,
                seq=next(self._seq),
                tensors=[rows, route.basis_of(layer)],
                body=body,
            )

        calls = [(route.links[idx], frame()) for idx in nodes.own]
        budget_s = RELAY_SHARE * deadline_s
        num_notes = 0
        for workers in nodes.others:
            # In turn: relaying is work.
            first = workers[self._turn % len(workers)]
            if len(workers) == 1:
                body = b""
            elif way == "relay":
                body = encode(Relay(list(workers), budget_s))
            else:
                ticket = next(self._tickets)
                note = encode(Hold(ticket, deadline_s))
                for idx in workers:
                    if idx != first:
                        route.links[idx].post(frame(note, FrameKind.NOTE))
                        num_notes += 1
                body = encode(Reduce(list(workers), ticket, budget_s))
            calls.append((route.links[first], frame(body)))
        replies = await self._replies(calls, rows, deadline_s)
        metrics.MESSAGES.labels("intra").inc(2 * len(nodes.own))
        metrics.MESSAGES.labels("inter").inc(2 * len(nodes.others) + num_notes)
        return _in_order(nodes, replies, len(hidden))

    async def _replies(
        self,
        calls: Sequence[tuple[Link, Frame]],
        rows: Tensor,
        deadline_s: float,
    ) -> list[Tensor]:
        replies: list[Frame] = []
        outcomes = await self._network.exchange(calls, deadline_s)
        for (link, request), outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, MoesaicError):
                raise outcome
            if not outcome.tensors or not is_sum_of(outcome.tensors[0], rows):
                link.discard("reply has another shape")
                raise ExpertUnavailable(
                    request.layer, cause=f"{link.peer}: reply has another shape"
                )
            replies.append(outcome)
        if len({reply.digest for reply in replies}) > 1:
            raise ExpertUnavailable(calls[0][1].layer, cause="its workers chose differently")
        return [from_wire(reply.tensors[0]) for reply in replies]


def _in_order(nodes: Nodes, replies: Sequence[Tensor], rows: int) -> Tensor:
    """Add up node by node, nodes by their first worker, wherever the own node comes."""
    num_own = len(nodes.own)
    sums = {workers[0]: part for workers, part in zip(nodes.others, replies[num_own:], strict=True)}
    if num_own:
        sums[nodes.own[0]] = add_up(replies[:num_own], rows)
    # One that is alone on its node is the sum of its node, zeros included.
    return add_up([sums[first] for first in sorted(sums)], rows)
