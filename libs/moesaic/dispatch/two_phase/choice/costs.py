"""Cost of a layer by the way its rows go (JANUS section 3.2). Pure.

========== ==================================================== ==========================
way        rows of one attention node                           sums
========== ==================================================== ==========================
``direct`` each worker's to every expert worker                 one of each expert worker
``reduce`` brought together, to every expert worker (case 1)    one of each expert node
``relay``  brought together, to one expert worker of each node, one of each expert node
           which hands them on to its colleagues (case 2)
========== ==================================================== ==========================
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from moesaic.messages.performance import PART_TERMS, PartCost

Way = Literal["direct", "reduce", "relay"]
WAYS: tuple[Way, ...] = get_args(Way)

BURST = 8  # messages at the same time, of which measurements find the overhead of each


@dataclass(frozen=True)
class LinkCost:
    """Cost of messages over one kind of link."""

    latency_s: float  # passes before a message is there, however many are under way
    message_s: float  # keeps an end busy for every message
    bytes_per_s: float

    @property
    def part(self) -> PartCost:
        """The same as a part of the performance model."""
        unit_s = self.latency_s, self.message_s, 1 / self.bytes_per_s
        return PartCost(terms=PART_TERMS["link.inter"], unit_s=unit_s)


@dataclass(frozen=True)
class LinkCosts:
    """Costs of the two kinds: inside a node, and between nodes."""

    intra: LinkCost
    inter: LinkCost

    @classmethod
    def of(cls, surveys: Collection["LinkSurvey"]) -> "LinkCosts":
        """Take of each link the best that was found, and of each kind the slowest link.

        Whatever else machines do makes measurements only worse.
        """
        intra = zip(*(survey.intra for survey in surveys), strict=True)
        inter = zip(*(survey.inter for survey in surveys), strict=True)
        return cls(
            slowest([_best(link) for link in intra]), slowest([_best(link) for link in inter])
        )


class LinkSurvey(NamedTuple):
    """Costs that one measurement has found, link by link."""

    intra: Sequence[LinkCost]
    inter: Sequence[LinkCost]


@dataclass(frozen=True)
class RoundShape:
    """Workers and bytes of one layer of one attention node.

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
class LinkLoad:
    """Load of one kind of link: ``hops`` one after the other, everything else beside it."""

    hops: int
    messages: int
    nbytes: int

    def seconds(self, cost: LinkCost) -> float:
        """Seconds that this should take."""
        return cost.part.seconds(self.hops, self.messages, self.nbytes)


@dataclass(frozen=True)
class RoundTraffic:
    """Load of all links in one round, both ways.

    Attributes:
        inter: between nodes; bytes over the fullest link, this node's or that of an expert node, which all
            senders share.
        intra: on this node.
        far: on that expert node where most is handed on; the nodes do so at the same time.
    """

    inter: LinkLoad
    intra: LinkLoad
    far: LinkLoad

    def seconds(self, costs: LinkCosts) -> float:
        """Seconds that this should take, experts not counted."""
        inside = self.intra.seconds(costs.intra) + self.far.seconds(costs.intra)
        return self.inter.seconds(costs.inter) + inside


def traffic(way: Way, shape: RoundShape) -> RoundTraffic:
    """Count what a round that goes this way moves."""
    both = shape.request_bytes + shape.reply_bytes
    there, nodes, asked = 2 * bool(shape.instances), len(shape.instances), sum(shape.instances)
    largest = shape.senders * max(shape.instances, default=0)
    asked_fully, nodes_fully = max(asked, largest), max(nodes, shape.senders * bool(nodes))
    own = shape.own_instances
    if way == "direct":
        return RoundTraffic(
            inter=LinkLoad(there, 2 * shape.members * asked, asked_fully * both),
            intra=LinkLoad(2 * bool(own), 2 * shape.members * own, own * both),
            far=LinkLoad(0, 0, 0),
        )
    others = shape.members - 1
    near = LinkLoad(
        2 * bool(others) + 2 * bool(own),
        2 * others + 2 * own,
        own * both + both * others // shape.members,
    )
    most = max((count - 1 for count in shape.instances), default=0)
    if way == "reduce":
        nbytes = asked_fully * shape.request_bytes + nodes_fully * shape.reply_bytes
        inter = LinkLoad(there, asked + nodes, nbytes)
        far = LinkLoad(2 * bool(most), 2 * most, most * shape.reply_bytes)
    else:
        inter = LinkLoad(there, 2 * nodes, nodes_fully * both)
        far = LinkLoad(2 * bool(most), 2 * most, most * both)
    return RoundTraffic(inter, near, far)


def predict(shape: RoundShape, costs: LinkCosts) -> dict[Way, float]:
    """Predict the seconds that each way should take, experts not counted."""
    return {way: traffic(way, shape).seconds(costs) for way in WAYS}


def slowest(costs: Sequence[LinkCost]) -> LinkCost:
    """Take one cost for links of one kind: of each part the worst."""
    return LinkCost(
        max(cost.latency_s for cost in costs),
        max(cost.message_s for cost in costs),
        min(cost.bytes_per_s for cost in costs),
    )


def _best(costs: Sequence[LinkCost]) -> LinkCost:
    """Take the quickest lone message and the quickest burst, and part them into latency and overhead.

    The least latency and the least overhead would be of different measurements: each is what noise
    left over of the other.
    """
    alone_s = min(cost.latency_s + cost.message_s for cost in costs)
    burst_s = min(cost.latency_s + BURST * cost.message_s for cost in costs)
    message_s = min(max(burst_s - alone_s, 0.0) / (BURST - 1), alone_s)
    return LinkCost(alone_s - message_s, message_s, max(cost.bytes_per_s for cost in costs))
