"""Placements of workers that divide their memory over layers as they like, completed or begun. Pure.

Edge agents have so many experts in memory over all layers together. When workers come or go, what is held
stays; experts that nobody holds go where there is most room, and room that is left takes experts with the
fewest replicas.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import PlacementInfeasible
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.placement.policies.uniform import Slots


def fill(num_experts: int, held: Sequence[Slots], capacities: Sequence[int]) -> list[Slots]:
    """Complete what is held, moving as little as possible.

    Args:
        num_experts: experts per layer, E.
        held: ``[L][N][...]``, experts that workers hold; -1 counts for nothing. Not changed.
        capacities: experts of each worker, over all layers, ``[N]``.

    Returns:
        ``[L][N][...]``, ascending, without empty slots.

    Raises:
        PlacementInfeasible: the workers cannot hold every expert.
    """
    holds = _table(num_experts, held, len(capacities))
    capacity = np.minimum(np.asarray(capacities), len(held) * num_experts)
    if (missing := len(held) * num_experts - int(capacity.sum())) > 0:
        raise PlacementInfeasible(missing, 0)
    for n in range(len(capacity)):
        # It may have less memory than before.
        while holds[:, n].sum() > capacity[n]:
            _drop_most_replicated(holds, n)
    free = capacity - holds.sum(axis=(0, 2))
    for layer, expert in np.argwhere(~holds.any(axis=1)).tolist():
        n = int(free.argmax())
        if free[n] <= 0:
            n = _drop_any_duplicate(holds)
            free[n] += 1
        holds[layer, n, expert] = True
        free[n] -= 1
    _add_replicas(holds, capacity)
    return [
        [np.flatnonzero(holds[layer, n]).tolist() for n in range(len(capacity))]
        for layer in range(len(held))
    ]


def _table(num_experts: int, held: Sequence[Slots], num_workers: int) -> NDArray[np.bool_]:
    holds = np.zeros((len(held), num_workers, num_experts), bool)
    for layer, by_worker in enumerate(held):
        for n, experts in enumerate(by_worker):
            holds[layer, n, [expert for expert in experts if expert != EMPTY_SLOT]] = True
    return holds


def _add_replicas(holds: NDArray[np.bool_], capacity: NDArray[np.int64]) -> None:
    """Fill the room that is left, in place: fewest replicas first, ties by layer and expert."""
    for n in range(len(capacity)):
        room = int(capacity[n] - holds[:, n].sum())
        if room > 0:
            replicas = np.where(holds[:, n], np.iinfo(np.int64).max, holds.sum(axis=1))
            fewest = np.argsort(replicas, axis=None, kind="stable")[:room]
            layers, experts = np.unravel_index(fewest, replicas.shape)
            holds[layers, n, experts] = True


def _drop_most_replicated(holds: NDArray[np.bool_], n: int) -> None:
    replicas = np.where(holds[:, n], holds.sum(axis=1), 0)
    layer, expert = np.unravel_index(int(replicas.argmax()), replicas.shape)
    holds[layer, n, expert] = False


def _drop_any_duplicate(holds: NDArray[np.bool_]) -> int:
    """Make room for one expert, in place; there is a duplicate while all workers are full.

    Returns:
        The worker that has room now.
    """
    replicas = holds.sum(axis=1)
    layer, expert = np.unravel_index(int(replicas.argmax()), replicas.shape)
    n = int(np.flatnonzero(holds[layer, :, expert])[-1])
    holds[layer, n, expert] = False
    return n
