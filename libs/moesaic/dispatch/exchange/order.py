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
    """The float32 sum of tensors ``[T, H]``, from the first to the last. Those of workers that had
    nothing to add have no rows; if all are such, so is the sum."""
    some = [part for part in parts if len(part)]
    if not some:
        return parts[0].float()
    total = some[0].float() + 0.0  # so that no zero's sign depends on who had nothing to add
    for part in some[1:]:
        total = total + part
    return total


def whole(total: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A sum of everything: zeros of ``shape`` if nobody had anything to add."""
    return total if len(total) else total.new_zeros(shape)


def combine(
    workers: Sequence[PlacedWorker], parts: Mapping[int, Tensor], shape: tuple[int, ...]
) -> Tensor:
    """The sum ``[T, H]`` of what the workers with these indices have computed, node by node."""
    nodes = by_node(workers, parts).values()
    return whole(add_up([add_up([parts[i] for i in node]) for node in nodes]), shape)
