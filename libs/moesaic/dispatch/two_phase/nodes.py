"""Expert workers that can be reached, by node."""

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.dispatch.links import DialledLinks, Endpoint, LinkEvents
from moesaic.dispatch.route import Route
from moesaic.dispatch.sum_order import by_node
from moesaic.transport.contract import Network


@dataclass(frozen=True)
class Nodes:
    """Workers that are asked, seen from one node."""

    own: tuple[int, ...]  # workers on the own node
    others: tuple[tuple[int, ...], ...]  # by node

    @classmethod
    def of(cls, route: Route, asked: Sequence[int], node: str) -> "Nodes":
        """Group the workers with these indices, the targets of a layer or all that are live."""
        found = by_node(route.placement.workers, asked)
        own = tuple(found.get(node, ()))
        return cls(own, tuple(tuple(w) for name, w in found.items() if name != node))


def links_inside(network: Network) -> DialledLinks[Endpoint]:
    """Keep links to workers of the own node, dialled when they are first wanted."""
    return DialledLinks(network, LinkEvents("neighbour.linked", "neighbour.unreachable"))
