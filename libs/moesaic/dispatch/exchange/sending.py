"""Phase 2: one batch of rows to the expert nodes, one sum back from each."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.dispatch.exchange import metrics
from moesaic.dispatch.exchange.costs import Case, Shape
from moesaic.dispatch.exchange.order import add_up, by_node, is_part
from moesaic.dispatch.exchange.orders import Hold, Reduce, Relay, encode
from moesaic.errors import ExpertUnavailable, MoesaicError
from moesaic.messages.placement import Placement
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

RELAY_SHARE = 0.7  # of the time for an exchange: a relay must give up on colleagues before we do
FIRST_SEQ = 1 << 61  # apart from frames that go directly over the same links at the same time


class Reach(Protocol):
    """A placement, and what of it can be reached."""

    @property
    def placement(self) -> Placement:
        """What is placed where."""
        ...

    @property
    def live(self) -> Sequence[int]:
        """Indices of the workers that may serve."""
        ...

    @property
    def links(self) -> Mapping[int, Link]:
        """Links to them, by index."""
        ...

    @property
    def targets(self) -> Mapping[int, Sequence[int]]:
        """By layer, indices of the workers that are asked."""
        ...

    def terms_of(self, layer: int) -> Tensor:
        """What a request says besides rows: one tensor, the same for all rows."""
        ...


@dataclass(frozen=True)
class Nodes:
    """Who is asked for one layer, seen from one node."""

    own: tuple[int, ...]  # workers on the own node
    others: tuple[tuple[int, ...], ...]  # by node

    @classmethod
    def of(cls, reach: Reach, layer: int, node: str) -> "Nodes":
        """Group the targets of a layer."""
        found = by_node(reach.placement.workers, reach.targets[layer])
        own = tuple(found.get(node, ()))
        return cls(own, tuple(tuple(w) for name, w in found.items() if name != node))

    def shape(
        self, members: int, rows: int, row_bytes: int, sum_bytes: int, senders: int = 1
    ) -> Shape:
        """What ``members`` workers move with so many rows, and as many sums, beside other nodes."""
        return Shape(
            members=members,
            instances=tuple(len(workers) for workers in self.others),
            own_instances=len(self.own),
            request_bytes=rows * row_bytes,
            reply_bytes=rows * sum_bytes,
            senders=senders,
        )


class Sender:
    """Asks expert nodes. Lives on the event loop of ``network``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._seq, self._tickets, self._turn = itertools.count(FIRST_SEQ), itertools.count(1), 0

    async def send(
        self,
        case: Case,
        reach: Reach,
        layer: int,
        nodes: Nodes,
        hidden: Tensor,
        deadline_s: float,
    ) -> Tensor:
        """The sum for every row of ``hidden``, float32 ``[T, H]``, in the order of ``order``.

        Workers of the own node, and one that is alone on its node, are asked directly.

        Raises:
            MoesaicError: somebody failed; nothing is known of the sum.
        """
        self._turn += 1
        step_id = os.urandom(16)  # rows of several steps may be in it
        calls: list[tuple[Link, Frame]] = []
        added_up: list[int] = []  # by call: workers whose sums the reply must hold, 0 for one

        def frame(body: bytes = b"", kind: FrameKind = FrameKind.REQUEST) -> Frame:
            return Frame(
                kind=kind,
                request_id=step_id,
                epoch=reach.placement.epoch,
                layer=layer,
                seq=next(self._seq),
                tensors=[hidden, reach.terms_of(layer)],
                body=body,
            )

        for idx in nodes.own:
            calls.append((reach.links[idx], frame()))
            added_up.append(0)
        budget_s = RELAY_SHARE * deadline_s
        num_notes = 0
        for workers in nodes.others:
            first = workers[self._turn % len(workers)]  # in turn: relaying is work
            if len(workers) == 1:
                body = b""
            elif case == "case-2":
                body = encode(Relay(list(workers), budget_s))
            else:
                ticket = next(self._tickets)
                note = encode(Hold(ticket, deadline_s))
                for idx in workers:
                    if idx != first:
                        reach.links[idx].post(frame(note, FrameKind.NOTE))
                        num_notes += 1
                body = encode(Reduce(list(workers), ticket, budget_s))
            calls.append((reach.links[first], frame(body)))
            added_up.append(len(workers) if body else 0)
        replies = await self._replies(calls, added_up, hidden, deadline_s)
        metrics.MESSAGES.labels("intra").inc(2 * len(nodes.own))
        metrics.MESSAGES.labels("inter").inc(2 * len(nodes.others) + num_notes)
        return _in_order(nodes, replies, len(hidden))

    async def _replies(
        self,
        calls: Sequence[tuple[Link, Frame]],
        added_up: Sequence[int],
        hidden: Tensor,
        deadline_s: float,
    ) -> list[Tensor]:
        replies: list[Frame] = []
        outcomes = await self._network.exchange(calls, deadline_s)
        for (link, request), count, outcome in zip(calls, added_up, outcomes, strict=True):
            layer = request.layer
            if isinstance(outcome, MoesaicError):
                raise outcome
            if not outcome.tensors or not is_part(outcome.tensors[0], hidden):
                link.discard("reply has another shape")
                raise ExpertUnavailable(layer, cause=f"{link.peer}: reply has another shape")
            if outcome.flags != count:  # it may be of a version that knows no orders
                raise ExpertUnavailable(layer, cause=f"{link.peer} did not add up {count} sums")
            replies.append(outcome)
        if len({reply.digest for reply in replies}) > 1:
            raise ExpertUnavailable(calls[0][1].layer, cause="its workers chose differently")
        return [reply.tensors[0] for reply in replies]


def _in_order(nodes: Nodes, replies: Sequence[Tensor], rows: int) -> Tensor:
    """Add up node by node, nodes by their first worker, wherever the own node comes."""
    num_own = len(nodes.own)
    sums = {workers[0]: part for workers, part in zip(nodes.others, replies[num_own:], strict=True)}
    if num_own:
        sums[nodes.own[0]] = add_up(replies[:num_own], rows)
    # One that is alone on its node is the sum of its node, zeros included.
    return add_up([sums[first] for first in sorted(sums)], rows)
