"""Who belongs to which node, and the order in which partial sums are added up. Pure.

Workers by index inside their node, nodes by their first worker: one order for every way to exchange,
so that neither the way nor who answers first changes a bit of the sum.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from moesaic.messages.placement import PlacedWorker


def by_node(workers: Sequence[PlacedWorker], indices: Iterable[int]) -> dict[str, list[int]]:
    """The ``indices`` into ``workers`` by node name, both in the order of sums."""
    nodes: dict[str, list[int]] = {}
    for idx in sorted(indices):
        nodes.setdefault(workers[idx].node_name, []).append(idx)
    return nodes


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The float32 sum of tensors of one shape, from the first to the last."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def combine(workers: Sequence[PlacedWorker], parts: Mapping[int, Tensor]) -> Tensor:
    """The sum of what the workers with these indices have computed, node by node."""
    return add_up([add_up([parts[i] for i in node]) for node in by_node(workers, parts).values()])
