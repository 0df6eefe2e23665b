"""Placement where rows come from: few calls to other instances, by DanceMoE's heuristic.

It matters where every instance has traffic of its own, as edge servers do. ``PlacementProblem.demand``
says how many rows come from where; without it all instances want the same experts.
"""

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Counts
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats


def dance(problem: PlacementProblem) -> list[Slots]:
    """Give layers of even demand more slots, then fill these with the experts in demand.

    DanceMoE section III, algorithms 1 and 2. Its pseudo-code leaves three things open: an instance
    without traffic takes the mean entropy of the others; slots that a layer cannot use go to the
    instance's other layers; experts without a replica take, one by one, the place of the duplicate
    whose loss costs least.

    Raises:
        PlacementInfeasible: the slots cannot hold every expert.
    """
    problem.require_room()
    counts = layer_counts(problem)  # [N, L]
    placed = []
    for layer_idx in range(len(problem.traffic)):
        demand = problem.demand_of(layer_idx)
        held = np.zeros((problem.num_experts, problem.num_instances), bool)
        for n, rows in enumerate(demand):
            held[np.argsort(-rows, kind="stable")[: counts[n, layer_idx]], n] = True
        _cover(held, demand)
        slots = counts[:, layer_idx] if problem.pooled else problem.slots
        placed.append(as_slots(held, slots))
    return placed


def layer_counts(problem: PlacementProblem) -> Counts:
    """Divide each instance's slots over the layers (algorithm 1).

    Without ``problem.pooled`` every layer has the same slots, and there is nothing to divide.

    Returns:
        Experts that each instance holds of each layer, ``[N, L]``.
    """
    num_layers, num_experts = len(problem.traffic), problem.num_experts
    room = np.minimum(np.asarray(problem.slots), num_experts)
    if not problem.pooled:
        return np.repeat(room[:, None], num_layers, axis=1)
    entropy = _entropies(problem)
    counts = np.stack(
        [
            _divided(int(count) * num_layers, weights, num_experts)
            for count, weights in zip(problem.slots, entropy, strict=True)
        ]
    )
    while (short := counts.sum(axis=0) - num_experts).min() < 0:
        # A layer that lacks slots takes one from the layer that has most to spare. Any instance has
        # room for one expert more of it, for all together do not hold every one.
        lacking, spare = int(short.argmin()), int(short.argmax())
        giver = int(counts[:, spare].argmax())
        counts[giver, spare] -= 1
        counts[giver, lacking] += 1
    return counts


def _entropies(problem: PlacementProblem) -> Floats:
    """Entropy of each instance's demand in each layer, in bits, ``[N, L]``."""
    demand = np.stack([problem.demand_of(i) for i in range(len(problem.traffic))], axis=1)
    total = demand.sum(axis=2, keepdims=True)
    fraction = np.divide(demand, total, out=np.zeros_like(demand), where=total > 0)
    logs = np.log2(fraction, out=np.zeros_like(fraction), where=fraction > 0)
    entropy: Floats = -(fraction * logs).sum(axis=2)
    silent = demand.sum(axis=(1, 2)) == 0
    if silent.any() and not silent.all():
        entropy[silent] = entropy[~silent].mean(axis=0)
    entropy[entropy.sum(axis=1) == 0] = 1.0  # equal parts
    return entropy


def _divided(budget: int, weights: Floats, most: int) -> Counts:
    """Divide ``budget`` in proportion to ``weights``, by largest remainder; no part is above ``most``."""
    budget = min(budget, most * len(weights))
    counts = np.zeros(len(weights), np.int64)
    while (left := budget - int(counts.sum())) > 0:
        open_ = np.where(counts < most, weights, 0.0)
        if open_.sum() == 0:
            open_ = (counts < most).astype(np.float64)
        exact = left * open_ / open_.sum()
        whole = np.minimum(np.floor(exact).astype(np.int64), most - counts)
        if not whole.any():
            rest = np.lexsort((np.arange(len(weights)), -np.where(counts < most, exact, -1.0)))
            whole[rest[: min(left, int((counts < most).sum()))]] = 1
        counts += whole
    return counts


def _cover(held: NDArray[np.bool_], demand: Floats) -> None:
    """Replace duplicates, in place, until every expert is held (algorithm 2, second part)."""
    while not (covered := held.any(axis=1)).all():
        loss = np.where(held & (held.sum(axis=1) > 1)[:, None], demand.T, np.inf)  # [E, N]
        dropped, n = np.unravel_index(int(loss.argmin()), loss.shape)
        wanted = np.where(covered, -1.0, demand[n])
        held[dropped, n] = False
        held[int(wanted.argmax()), n] = True
