"""Costs and replicas that a scheduling goes by, as far as the placement alone says them.

Workers schedule batch by batch with these, and so do replays of traffic.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.schedule.aebs import NONE, Costs, memory_bound
from moesaic.placement.schedule.assignment import assign_holders

Choices = NDArray[np.int32]  # [T, k]: the instance that serves each choice
Choose = Callable[[NDArray[Any], NDArray[np.int32], np.random.Generator], Choices]
"""Another way to choose, from the experts of each row ``[T, k]``, live replicas ``[E, N]`` and a source of chance.

Every activated expert has a live replica."""


def serving_costs(scheduling: ExpertScheduling, ridges: Sequence[int]) -> Costs[NDArray[np.int64]]:
    """Costs in rows: an expert costs as much as its rows, and no less than its weights.

    The ridge is the least that any worker has measured. With one ridge for all, experts with few rows
    cost the same everywhere, and their schedule is optimal. If a worker has not measured one,
    or the scheduling does not count rows, every expert costs 1.

    Args:
        scheduling: of the attention workers.
        ridges: ``[N]``, ``ridge_rows`` of the workers; 0 is not known.
    """
    ridge = min(ridges) if scheduling == "aebs" else 0
    if not ridge:
        return memory_bound(len(ridges))
    return Costs(np.full(len(ridges), ridge, np.int64), np.ones(len(ridges), np.int64))


def serving_replicas(scheduling: ExpertScheduling, held: NDArray[np.int32]) -> NDArray[np.int32]:
    """Drop the replicas that the scheduling never uses, for any rows.

    Args:
        scheduling: of the attention workers.
        held: ``[E, N]``, from ``replica_table``, of live instances.
    """
    if scheduling == "static":
        holders = [np.flatnonzero(row >= 0).tolist() for row in held]
        return replicas_on(held, assign_holders(holders, held.shape[1]))
    return held


def replicas_on(held: NDArray[np.int32], instance: NDArray[Any]) -> NDArray[np.int32]:
    """Keep of each expert the replica on ``instance`` ``[E]`` alone."""
    return np.where(np.arange(held.shape[1]) == instance[:, None], held, np.int32(NONE))


def activated_experts(
    topk_ids: NDArray[Any], served: Choices, num_experts: int, num_instances: int
) -> NDArray[np.int64]:
    """Count the distinct experts that each instance has to compute, int64 ``[N]``."""
    active = np.zeros((num_experts, num_instances), bool)
    active[topk_ids, served] = True
    counts: NDArray[np.int64] = active.sum(axis=0)
    return counts
