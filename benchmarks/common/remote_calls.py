"""Calls to other instances that a placement needs."""

import numpy as np

from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats


def remote_calls(placed: list[Slots], demand: Floats) -> float:
    """Count the rows that need an expert which the instance they come from does not hold.

    Args:
        placed: ``[L][N][slots]``.
        demand: rows by origin, ``[N, L, E]``.
    """
    total = 0.0
    for layer_idx, layer in enumerate(placed):
        for n, experts in enumerate(layer):
            held = np.zeros(demand.shape[2], bool)
            held[[expert for expert in experts if expert >= 0]] = True
            total += float(demand[n, layer_idx, ~held].sum())
    return total
