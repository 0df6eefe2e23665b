"""Expert workers that can be reached, by node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.dispatch.links import DialledLinks, Endpoint, LinkEvents
from moesaic.dispatch.routed.sum_order import by_node
from moesaic.dispatch.two_phase.choice.costs import RoundShape
from moesaic.messages.placement import Placement
from moesaic.transport.contract import Link, Network


class Reach(Protocol):
    """A placement, and what of it can be reached."""

    @property
    def placement(self) -> Placement:
        """The placement."""
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
        """Indices of the workers that are asked, by layer."""
        ...

    def basis_of(self, layer: int) -> Tensor:
        """Tensor that goes with the rows of a layer, the same for all of them."""
        ...


@dataclass(frozen=True)
class Nodes:
    """Workers that are asked, seen from one node."""

    own: tuple[int, ...]  # workers on the own node
    others: tuple[tuple[int, ...], ...]  # by node

    @classmethod
    def of(cls, reach: Reach, asked: Sequence[int], node: str) -> "Nodes":
        """Group the workers with these indices, the targets of a layer or all that are live."""
        found = by_node(reach.placement.workers, asked)
        own = tuple(found.get(node, ()))
        return cls(own, tuple(tuple(w) for name, w in found.items() if name != node))

    def shape(self, members: int, rows: int, row_bytes: int) -> RoundShape:
        """Describe a round of so many workers and rows; sums take as many bytes.

        Sums inside a node are float32, and may take more: there bytes cost little.
        """
        return RoundShape(
            members=members,
            instances=tuple(len(workers) for workers in self.others),
            own_instances=len(self.own),
            request_bytes=rows * row_bytes,
            reply_bytes=rows * row_bytes,
        )


def links_inside(network: Network) -> DialledLinks[Endpoint]:
    """Keep links to workers of the own node, dialled when they are first wanted."""
    return DialledLinks(network, LinkEvents("neighbour.linked", "neighbour.unreachable"))
