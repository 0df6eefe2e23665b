"""What an exchange moves, and how long that should take. Pure.

One layer of one attention node, as JANUS section 3.2 has it: ``direct`` sends the rows of every
attention worker to every expert worker. The others bring the node's rows together first, and get one
sum back from every expert node. In between, ``case-1`` sends the rows to each expert worker, and
``case-2`` once to each expert node, where a relay hands them on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Case = Literal["direct", "case-1", "case-2"]
CASES: tuple[Case, ...] = get_args(Case)


@dataclass(frozen=True)
class LinkCost:
    """What messages over one kind of link cost."""

    latency_s: float  # passes before a message is there, however many are under way
    message_s: float  # keeps an end busy for every message
    bytes_per_s: float


@dataclass(frozen=True)
class LinkCosts:
    """The two kinds: inside a node, and between nodes."""

    intra: LinkCost
    inter: LinkCost


@dataclass(frozen=True)
class Shape:
    """One layer of one attention node.

    Attributes:
        members: attention workers whose rows go together.
        instances: expert workers that serve the layer, by expert node, this node left out.
        own_instances: those on the attention workers' own node.
        request_bytes: of all members' rows.
        reply_bytes: of one sum for all of them.
        senders: attention nodes that send as much to the same expert nodes, this one included.
    """

    members: int
    instances: tuple[int, ...]
    own_instances: int
    request_bytes: int
    reply_bytes: int
    senders: int = 1


@dataclass(frozen=True)
class Load:
    """What one kind of link carries: ``hops`` one after the other, everything else beside it."""

    hops: int
    messages: int
    nbytes: int

    def seconds(self, cost: LinkCost) -> float:
        """How long that should take."""
        return (
            self.hops * cost.latency_s
            + self.messages * cost.message_s
            + self.nbytes / cost.bytes_per_s
        )


@dataclass(frozen=True)
class Traffic:
    """What one exchange moves, both ways.

    Attributes:
        inter: between nodes; bytes over the fullest link, this node's or that of an expert node, which all
            senders share.
        intra: on this node.
        far: on that expert node where most is handed on; the nodes do so at the same time.
    """

    inter: Load
    intra: Load
    far: Load

    def seconds(self, costs: LinkCosts) -> float:
        """How long that should take, experts not counted."""
        inside = self.intra.seconds(costs.intra) + self.far.seconds(costs.intra)
        return self.inter.seconds(costs.inter) + inside


def traffic(case: Case, shape: Shape) -> Traffic:
    """What an exchange in this way moves."""
    both = shape.request_bytes + shape.reply_bytes
    there, nodes, asked = 2 * bool(shape.instances), len(shape.instances), sum(shape.instances)
    largest = shape.senders * max(shape.instances, default=0)
    asked_fully, nodes_fully = max(asked, largest), max(nodes, shape.senders * bool(nodes))
    own = shape.own_instances
    if case == "direct":
        return Traffic(
            inter=Load(there, 2 * shape.members * asked, asked_fully * both),
            intra=Load(2 * bool(own), 2 * shape.members * own, own * both),
            far=Load(0, 0, 0),
        )
    others = shape.members - 1
    gathered = Load(
        2 * bool(others) + 2 * bool(own),
        2 * others + 2 * own,
        own * both + both * others // shape.members,
    )
    most = max((count - 1 for count in shape.instances), default=0)
    if case == "case-1":
        nbytes = asked_fully * shape.request_bytes + nodes_fully * shape.reply_bytes
        inter = Load(there, asked + nodes, nbytes)
        far = Load(2 * bool(most), 2 * most, most * shape.reply_bytes)
    else:
        inter = Load(there, 2 * nodes, nodes_fully * both)
        far = Load(2 * bool(most), 2 * most, most * both)
    return Traffic(inter, gathered, far)


def predict(shape: Shape, costs: LinkCosts) -> dict[Case, float]:
    """Seconds that each way should take, experts not counted."""
    return {case: traffic(case, shape).seconds(costs) for case in CASES}


def slowest(costs: Sequence[LinkCost]) -> LinkCost:
    """One cost for links of one kind: of each part the worst."""
    return LinkCost(
        max(cost.latency_s for cost in costs),
        max(cost.message_s for cost in costs),
        min(cost.bytes_per_s for cost in costs),
    )
