"""Calls to other instances that a placement needs, and what they cost."""

import numpy as np

from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats


def remote_calls(placed: list[Slots], demand: Floats) -> float:
    """Count the rows that need an expert which the instance they come from does not hold.

    Args:
        placed: ``[L][N][slots]``.
        demand: rows by origin, ``[N, L, E]``.
    """
    return float(_remote(placed, demand).sum())


def predicted_cost(placed: list[Slots], problem: PlacementProblem) -> Floats:
    """Sum the costs of each instance's rows to experts that it does not hold.

    Args:
        placed: ``[L][N][slots]``.
        problem: its demand and ``remote_cost``; without either, its traffic and rows.

    Returns:
        float64 ``[N]``, in the unit of ``remote_cost``.
    """
    demand = [problem.demand_of(layer_idx) for layer_idx in range(len(problem.traffic))]
    return _remote(placed, np.stack(demand, axis=1))


def _remote(placed: list[Slots], demand: Floats) -> Floats:
    """Sum the demand of each instance for experts that it does not hold, ``[N]``."""
    total = np.zeros(len(demand))
    for layer_idx, layer in enumerate(placed):
        for n, experts in enumerate(layer):
            held = np.zeros(demand.shape[2], bool)
            held[[expert for expert in experts if expert >= 0]] = True
            total[n] += demand[n, layer_idx, ~held].sum()
    return total
