"""Placement with the fewest remote calls there can be.

====================  ==========================================================================
slots in each layer   exact: the linear program of each layer has an integral optimum
memory, one size      exact: a minimum-cost flow over all layers, see ``matching``
memory, many sizes    within a gap: counts of each layer from the linear program, then exact
====================  ==========================================================================
"""

import numpy as np

from moesaic.placement.policies.dance import layer_counts
from moesaic.placement.policies.linear import relaxed
from moesaic.placement.policies.matching import Held, best_holders, whole_worth
from moesaic.placement.policies.packing import fitted
from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Board, Counts, fill_up
from moesaic.placement.policies.room import (
    covering,
    even_shares,
    filled_up,
    most_of_a_layer,
    slots_by_layer,
    usable_bytes,
)
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats

KEPT_WORTH = 1e-6  # of all demand: the most that it may cost, in remote calls, to keep what is held


def optimal(problem: PlacementProblem) -> list[Slots]:
    """Place for the fewest remote calls there can be, weighed by their cost.

    With memory, experts that cost the same are chosen by traffic, then by the lowest id; with
    ``problem.held``, what is held already comes before both.

    Raises:
        InvalidInput: scipy is needed and not installed; memory for experts of one size needs none.
        PlacementInfeasible: the slots, or the memory, cannot hold every expert.
    """
    placed, _ = optimal_with_gap(problem)
    return placed


def optimal_with_gap(problem: PlacementProblem) -> tuple[list[Slots], float]:
    """Place as ``optimal`` does, and say how far from the optimum it may be.

    Returns:
        The placement ``[L][N][slots]``, and the largest share of its cost that a better one could
        save, in ``0..1``: 0 where it is known to be the optimum.

    Raises:
        InvalidInput: scipy is needed and not installed.
        PlacementInfeasible: the slots, or the memory, cannot hold every expert.
    """
    demand = np.stack([problem.demand_of(i) for i in range(len(problem.traffic))])  # [L, N, E]
    if problem.memory is None:
        return _by_slots(problem, demand), 0.0
    shares = even_shares(problem)
    worth = whole_worth(demand.transpose(0, 2, 1) + _kept_worth(problem, demand))
    ties = np.stack([problem.weights(i) for i in range(len(problem.traffic))])  # [L, E]
    if len(set(problem.sizes)) == 1:
        return _placed(_of_one_size(problem, worth, ties)), 0.0
    parts = relaxed(
        demand,
        usable_bytes(problem) / max(problem.sizes),
        np.asarray(problem.sizes) / max(problem.sizes),
        most_of_a_layer(problem),
    )
    # Each policy divides memory in one of the latter two ways, so none is better than all three.
    divided = _rounded(parts.sum(axis=2).T, problem), shares, layer_counts(problem)
    held = [_of_counts(counts, worth, ties) for counts in divided]
    costs = [float(demand.transpose(0, 2, 1)[~each].sum()) for each in held]
    cost, bound = min(costs), float((demand * (1 - parts)).sum())
    gap = max(0.0, 1 - bound / cost) if cost else 0.0
    return _placed(held[costs.index(cost)]), gap


def _by_slots(problem: PlacementProblem, demand: Floats) -> list[Slots]:
    """Solve layer by layer; slots that no demand is for go to the experts with most traffic."""
    placed = []
    for layer_idx, slots in enumerate(slots_by_layer(problem)):
        parts = relaxed(demand[layer_idx, None], np.asarray(slots), np.ones(1))
        board = Board(problem.num_experts, slots)
        for expert, n in np.argwhere(parts[0].T > 0.5).tolist():
            board.put(expert, n)
        assert board.held.any(axis=1).all()
        fill_up(board, problem.weights(layer_idx))
        placed.append(as_slots(board.held, slots))
    return placed


def _kept_worth(problem: PlacementProblem, demand: Floats) -> Floats:
    """Extra worth of experts where they are held, ``[L, E, N]``."""
    num_layers, num_instances, num_experts = demand.shape
    kept = np.zeros((num_layers, num_experts, num_instances))
    if problem.held is None:
        return kept
    for layer_idx, layer in enumerate(problem.held):
        for n, experts in enumerate(layer):
            kept[layer_idx, [expert for expert in experts if expert >= 0], n] = 1
    each = KEPT_WORTH * float(demand.sum()) / max(kept.sum(), 1)
    return kept * (each or 1.0)


def _of_one_size(problem: PlacementProblem, worth: Counts, ties: Floats) -> Held:
    """Hold what is worth most, ``[L, E, N]``; layers share an instance's memory."""
    _, num_experts, num_instances = worth.shape
    budget = usable_bytes(problem) // problem.sizes[0]
    most = most_of_a_layer(problem)
    if most.min() < num_experts:
        return best_holders(worth, ties, budget, most)
    # Nothing limits a layer: all experts are alike, which is much quicker to solve.
    held = best_holders(worth.reshape(1, -1, num_instances), ties.reshape(1, -1), budget, budget)
    return held.reshape(worth.shape)


def _rounded(counts: Floats, problem: PlacementProblem) -> Counts:
    """Round to whole experts that fit, ``[N, L]``: down, then up where most is cut off."""
    assert problem.memory is not None
    whole = np.floor(counts + 1e-6).astype(np.int64)
    for n, devices in enumerate(problem.memory):
        order = np.argsort(whole[n] - counts[n], kind="stable")
        row = np.array(fitted(whole[n].tolist(), problem.sizes, devices), np.int64)
        whole[n] = filled_up(row, order.tolist(), n, problem)
    return covering(whole, problem)


def _of_counts(counts: Counts, worth: Counts, ties: Floats) -> Held:
    """Hold what is worth most with so many experts of each layer, ``[N, L]``."""
    return np.concatenate(
        [
            best_holders(worth[layer_idx, None], ties[layer_idx, None], each, each)
            for layer_idx, each in enumerate(counts.T)
        ]
    )


def _placed(held: Held) -> list[Slots]:
    return [as_slots(layer, layer.sum(axis=0).tolist()) for layer in held]
