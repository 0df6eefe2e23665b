"""Placement where rows come from: few calls to other instances, by DanceMoE's heuristic.

It matters where every instance has traffic of its own, as edge servers do. ``PlacementProblem.demand``
says how many rows come from where; without it all instances want the same experts.
"""

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.policies.packing import fitted
from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Counts
from moesaic.placement.policies.room import (
    covering,
    filled_up,
    most_of_a_layer,
    slots_by_layer,
    usable_bytes,
)
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats


def dance(problem: PlacementProblem) -> list[Slots]:
    """Give layers of even demand more memory, then fill these with the experts in demand.

    DanceMoE section III, algorithms 1 and 2. Its pseudo-code leaves three cases open. An instance
    without traffic takes the mean entropy of the others. Memory that a layer cannot use goes to the
    instance's other layers. Each expert without a replica takes the place of the duplicate whose
    loss costs least.

    Raises:
        PlacementInfeasible: the slots, or the memory, cannot hold every expert.
    """
    counts = layer_counts(problem)  # [N, L]
    placed = []
    for layer_idx in range(len(problem.traffic)):
        demand = problem.demand_of(layer_idx)
        held = np.zeros((problem.num_experts, problem.num_instances), bool)
        for n, rows in enumerate(demand):
            held[np.argsort(-rows, kind="stable")[: counts[n, layer_idx]], n] = True
        _cover(held, demand)
        slots = counts[:, layer_idx].tolist() if problem.memory is not None else problem.slots
        placed.append(as_slots(held, slots))
    return placed


def layer_counts(problem: PlacementProblem) -> Counts:
    """Divide each instance's memory over the layers (algorithm 1).

    Without memory every layer has the same slots, and there is nothing to divide.

    Returns:
        Experts that each instance holds of each layer, ``[N, L]``.

    Raises:
        PlacementInfeasible: the slots, or the memory, cannot hold every expert.
    """
    if problem.memory is None:
        room = np.minimum(slots_by_layer(problem), problem.num_experts)
        return room.T
    entropy, sizes = _entropies(problem), np.asarray(problem.sizes)
    most, usable = most_of_a_layer(problem), usable_bytes(problem)
    counts = np.zeros(entropy.shape, np.int64)
    for n, devices in enumerate(problem.memory):
        wanted = _divided(int(usable[n]), entropy[n], int(most[n]), sizes)
        counts[n] = fitted(wanted.tolist(), problem.sizes, devices)
        order = np.argsort(-entropy[n], kind="stable").tolist()
        counts[n] = filled_up(counts[n], order, n, problem)
    return covering(counts, problem)


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
    # Equal parts
    entropy[entropy.sum(axis=1) == 0] = 1.0
    return entropy


def _divided(memory: int, weights: Floats, most: int, sizes: Counts) -> Counts:
    """Divide bytes in proportion to ``weights``, in whole experts, by largest remainder.

    Args:
        memory: bytes.
        weights: of each layer, ``[L]``.
        most: experts of one layer.
        sizes: bytes of one expert of each layer, ``[L]``.

    Returns:
        Experts of each layer, ``[L]``, at most ``most``.
    """
    counts = np.zeros(len(weights), np.int64)
    while True:
        left = memory - int(counts @ sizes)
        open_ = (counts < most) & (sizes <= left)
        if not open_.any():
            return counts
        share = np.where(open_, weights, 0.0)
        if share.sum() == 0:
            share = open_.astype(np.float64)
        exact = left * share / share.sum() / sizes
        whole = np.minimum(np.floor(exact).astype(np.int64), most - counts)
        if not whole.any():
            for layer_idx in np.argsort(-np.where(open_, exact, -1.0), kind="stable").tolist():
                if open_[layer_idx] and sizes[layer_idx] <= left:
                    whole[layer_idx] = 1
                    left -= int(sizes[layer_idx])
        counts += whole


def _cover(held: NDArray[np.bool_], demand: Floats) -> None:
    """Replace duplicates, in place, until every expert is held (algorithm 2, second part)."""
    while not (covered := held.any(axis=1)).all():
        loss = np.where(held & (held.sum(axis=1) > 1)[:, None], demand.T, np.inf)  # [E, N]
        dropped, n = np.unravel_index(int(loss.argmin()), loss.shape)
        wanted = np.where(covered, -1.0, demand[n])
        held[dropped, n] = False
        held[int(wanted.argmax()), n] = True
