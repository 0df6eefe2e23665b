"""Who belongs to which node, and the order in which partial sums are added up. Pure.

Workers by index inside their node, nodes by their first worker: one order for every way to exchange,
so that neither the way nor who answers first changes a bit of the sum.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moesaic.messages.placement import PlacedWorker


def by_node(workers: Sequence[PlacedWorker], indices: Iterable[int]) -> dict[str, list[int]]:
    """The ``indices`` into ``workers`` by node name, both in the order of sums."""
    nodes: dict[str, list[int]] = {}
    for idx in sorted(indices):
        nodes.setdefault(workers[idx].node_name, []).append(idx)
    return nodes


def add_up(parts: Sequence[Tensor], rows: int) -> Tensor:
    """The float32 sum ``[rows, H]`` of tensors of this shape, from the first to the last.

    A part without rows adds nothing. The sum begins with zeros, so that not even the sign of a zero
    depends on who had something to add.
    """
    total = torch.zeros(rows, parts[0].shape[1])
    for part in parts:
        if len(part):
            total += part
    return total


def is_part(part: Tensor, hidden: Tensor) -> bool:
    """Whether ``part`` can be part of the sum for the rows ``hidden``: as many, or none."""
    return part.shape[1] == hidden.shape[1] and len(part) in (0, len(hidden))


def combine(workers: Sequence[PlacedWorker], parts: Mapping[int, Tensor], rows: int) -> Tensor:
    """The sum of what the workers with these indices have computed, node by node."""
    nodes = by_node(workers, parts).values()
    return add_up([add_up([parts[idx] for idx in node], rows) for node in nodes], rows)
