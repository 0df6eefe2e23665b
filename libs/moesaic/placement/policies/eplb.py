"""Placement by rows, or by batches, with replicas for the experts that have most."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Board, Counts, replicate
from moesaic.placement.policies.room import slots_by_layer
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats


def eplb(problem: PlacementProblem) -> list[Slots]:
    """Replicate and place by rows alone: the balancer published with DeepSeek-V3.

    Groups of experts that divide evenly over nodes of one size go to nodes first. Replicas are then
    made and packed within each node, so that rows of one group stay on one node.
    Elsewhere all instances count as one node. Unlike the published one, no expert is placed twice
    on an instance.
    """
    placed = []
    for layer_idx, room in enumerate(slots_by_layer(problem)):
        weights = problem.weights(layer_idx)
        held = np.zeros((problem.num_experts, problem.num_instances), bool)
        for experts, instances in _node_shares(problem, weights, room):
            slots = [room[n] for n in instances.tolist()]
            replicas = replicate(weights[experts], slots)
            board = Board(len(experts), slots)
            pack(board, weights[experts], replicas)
            held[np.ix_(experts, instances)] = board.held
        placed.append(as_slots(held, room))
    return placed


def eplb_by_batches(problem: PlacementProblem) -> list[Slots]:
    """Balance as ``eplb`` does, by the batches in which experts are active instead of their rows."""
    return eplb(replace(problem, statistic="batches"))


def _node_shares(
    problem: PlacementProblem, weights: Floats, slots: Sequence[int]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Divide experts among nodes, as pairs of expert ids and instances; one pair where nodes do not count."""
    everything = np.arange(problem.num_experts), np.arange(problem.num_instances)
    if problem.nodes is None:
        return [everything]
    nodes = sorted(set(problem.nodes))
    of_node = [np.flatnonzero(np.array(problem.nodes) == node) for node in nodes]
    sums = {sum(min(slots[n], problem.num_experts) for n in mine.tolist()) for mine in of_node}
    per_node, rest = divmod(problem.num_groups, len(nodes))
    group_size, uneven = divmod(problem.num_experts, problem.num_groups)
    if rest or uneven or len(sums) > 1 or sums.pop() < per_node * group_size:
        return [everything]
    groups = Board(problem.num_groups, [per_node] * len(nodes))
    group_rows = weights.reshape(problem.num_groups, group_size).sum(axis=1)
    pack(groups, group_rows, np.ones(problem.num_groups, np.int64))
    experts = np.arange(problem.num_experts).reshape(problem.num_groups, group_size)
    return [(experts[groups.held[:, idx]].flatten(), mine) for idx, mine in enumerate(of_node)]


def pack(board: Board, weights: Floats, replicas: Counts) -> None:
    """Put replicas on the board, those with most rows first, each on the instance with fewest rows.

    Instances without room, or that hold the expert already, are passed over.

    Args:
        board: with room for all replicas.
        weights: rows of each expert, ``[E]``.
        replicas: of each expert, ``[E]``.
    """
    # Of one replica
    rows = weights / replicas
    order = np.lexsort((np.arange(len(weights)), -rows))
    for expert in np.repeat(order, replicas[order]).tolist():
        chosen = board.cheapest(expert, rows @ board.held)
        if chosen is None:
            board.make_room(expert)
        else:
            board.put(expert, chosen)
