"""Static assignment: a holder for each expert, computed alike by every worker from the placement alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NO_HOLDER = -1


def assign_holders(
    holders: Sequence[Sequence[int]], num_workers: int, live: Sequence[int] | None = None
) -> NDArray[np.int32]:
    """Choose one live holder for every expert, so that workers serve about equally many experts.

    Experts with the fewest holders choose first, ties by expert id; each takes its least loaded
    holder, ties by worker index. No worker needs to ask another: the same arguments give the same
    answer everywhere.

    Args:
        holders: for each expert, the indices of the workers that hold it.
        num_workers: workers in the placement.
        live: indices of the workers that may serve; None means all.

    Returns:
        int32 ``[E]``: the serving worker of each expert, -1 where no live worker holds it.
    """
    allowed = set(range(num_workers) if live is None else live)
    serving = np.full(len(holders), NO_HOLDER, dtype=np.int32)
    load = [0] * num_workers
    candidates = [[n for n in held if n in allowed] for held in holders]
    for expert in sorted(range(len(holders)), key=lambda e: (len(candidates[e]), e)):
        if candidates[expert]:
            chosen = min(candidates[expert], key=lambda n: (load[n], n))
            serving[expert] = chosen
            load[chosen] += 1
    return serving
