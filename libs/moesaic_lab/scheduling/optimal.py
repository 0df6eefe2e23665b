"""The best schedule there is, exact at any size, to measure others against; too slow for every step.

Experts that cost the same everywhere, each served by one of its holders, are a semi-matching. It is
optimal exactly if no path of moves leads from an instance to one that has at least two experts
less. Such paths are followed until none is left (Harvey, Ladner, Lovasz, Tamir: semi-matchings for
bipartite graphs and load balancing).
"""

from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.placement.schedule.aebs import NONE, UNAVAILABLE, live_replicas


def optimal_instances(
    activated: NDArray[np.bool_],
    replicas: NDArray[np.int32],
    *,
    live: ArrayLike | None = None,
    load: ArrayLike | None = None,
) -> NDArray[np.int32]:
    """Serve every activated expert so that the largest load is the least possible.

    Every other load is, too: sorted from the largest down, no schedule has smaller ones.

    Args:
        activated: bool ``[E]``.
        replicas: from ``replica_table``, ``[E, N]``.
        live: bool ``[N]``; None means all.
        load: int ``[N]``, experts that each instance has to serve besides; None means none.

    Returns:
        int32 ``[E]``: the instance; -1 where not activated, -2 where no live instance holds it.
    """
    held = live_replicas(replicas, live) >= 0
    num_instances = held.shape[1]
    loads: list[int] = [0] * num_instances if load is None else np.asarray(load).tolist()
    instance = np.where(activated, UNAVAILABLE, NONE).astype(np.int32)
    served: list[set[int]] = [set() for _ in range(num_instances)]
    holders = [np.flatnonzero(row).tolist() for row in held]
    for expert in np.flatnonzero(activated & held.any(axis=1)).tolist():
        chosen = min(holders[expert], key=loads.__getitem__)
        served[chosen].add(expert)
        loads[chosen] += 1
    while (path := _improving_path(served, holders, loads)) is not None:
        for expert, source, target in path:
            served[source].remove(expert)
            served[target].add(expert)
        loads[path[0][1]] -= 1
        loads[path[-1][2]] += 1
    for n, experts in enumerate(served):
        instance[list(experts)] = n
    return instance


def _improving_path(
    served: list[set[int]], holders: list[list[int]], loads: list[int]
) -> list[tuple[int, int, int]] | None:
    """Find moves (expert, from, to), one leading on to the next, that even two loads out; None if
    there are none."""
    for start in sorted(range(len(loads)), key=lambda n: -loads[n]):
        came: dict[int, tuple[int, int] | None] = {start: None}  # instance: (expert, from)
        queue = deque([start])
        while queue:
            source = queue.popleft()
            if loads[source] <= loads[start] - 2:
                return _walked(came, source)
            for expert in served[source]:
                for target in holders[expert]:
                    if target not in came:
                        came[target] = (expert, source)
                        queue.append(target)
    return None


def _walked(came: dict[int, tuple[int, int] | None], target: int) -> list[tuple[int, int, int]]:
    path = []
    while (step := came[target]) is not None:
        path.append((step[0], step[1], target))
        target = step[1]
    return path[::-1]
