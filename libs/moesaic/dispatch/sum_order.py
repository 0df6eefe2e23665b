"""The order in which partial sums are added up. Pure.

Workers by index inside their node, nodes by their first worker. It is one order for every way that
rows travel, so neither the way nor the first worker to answer changes a bit of the sum.
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
    """The float32 sum ``[rows, H]`` of tensors of this shape and any float, from the first to the last.

    A part without rows adds nothing. The sum begins with zeros, so not even the sign of a zero
    depends on the parts that have rows.
    """
    total = torch.zeros(rows, parts[0].shape[1], device=parts[0].device)
    for part in parts:
        if len(part):
            total += part
    return total


def combine(workers: Sequence[PlacedWorker], parts: Mapping[int, Tensor], rows: int) -> Tensor:
    """The sum of ``parts``, by index of their workers, node by node."""
    nodes = by_node(workers, parts).values()
    return add_up([add_up([parts[idx] for idx in node], rows) for node in nodes], rows)
