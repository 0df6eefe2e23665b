"""Policies that balance rows, or nothing: what others do, to compare with."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moesaic.placement import uniform as dealt
from moesaic.placement.problem import Problem, as_slots
from moesaic.placement.replication import Board, Counts, fill_up, replicate
from moesaic.placement.statistics import Floats
from moesaic.placement.uniform import Slots


def uniform(problem: Problem) -> list[Slots]:
    """Deal the experts round and round, whatever the traffic."""
    problem.require_room()
    return dealt.uniform(problem.num_experts, len(problem.traffic), problem.slots)


def redundance(problem: Problem) -> list[Slots]:
    """Any expert anywhere: one replica of each at random, then random ones up to every slot.

    The baseline of DanceMoE section IV. Drawn with a fixed seed, another one for each layer.
    """
    problem.require_room()
    placed = []
    for layer_idx in range(len(problem.traffic)):
        rng = np.random.default_rng([0, layer_idx])
        board = Board(problem.num_experts, problem.slots)
        for expert in rng.permutation(problem.num_experts).tolist():
            board.put(expert, _drawn(board, expert, rng))
        fill_up(board, rng.random(problem.num_experts))
        placed.append(as_slots(board.held, problem.slots))
    return placed


def _drawn(board: Board, expert: int, rng: np.random.Generator) -> int:
    lacking = (board.free > 0) & ~board.held[expert]
    return int(rng.choice(np.flatnonzero(lacking)))


def smartmoe(problem: Problem) -> list[Slots]:
    """One replica of each expert, and about equally many experts and rows on every instance.

    The placement that SmartMoE (USENIX ATC 2023) searches for, as DanceMoE section IV uses it: no
    replicas, so slots beyond one for each expert stay empty. Experts with most rows choose first,
    each the instance with fewest rows that has not got its share of the experts yet.
    """
    problem.require_room()
    shares = _shares(problem.num_experts, problem.slots)
    placed = []
    for layer_idx in range(len(problem.traffic)):
        board = Board(problem.num_experts, shares.tolist())
        weights = problem.weights(layer_idx)
        _pack(board, weights, np.ones(problem.num_experts, np.int64))
        placed.append(as_slots(board.held, problem.slots))
    return placed


def _shares(num_experts: int, slots: tuple[int, ...]) -> Counts:
    """``num_experts`` in parts as large as the slots allow, in proportion to these."""
    room = np.minimum(np.asarray(slots), num_experts)
    exact = num_experts * room / room.sum()
    parts: Counts = np.floor(exact).astype(np.int64)
    largest = np.lexsort((np.arange(len(slots)), -(exact - parts)))
    parts[largest[: num_experts - int(parts.sum())]] += 1
    return parts


def eplb(problem: Problem) -> list[Slots]:
    """Replicas and instances by rows alone: the balancer published with DeepSeek-V3.

    Where groups of experts divide evenly over nodes of one size, groups go to nodes first, then
    replicas are made and packed within each node, so that rows of one group stay on one node.
    Elsewhere all instances count as one node. Unlike the published one, no expert is placed twice
    on an instance.
    """
    problem.require_room()
    placed = []
    for layer_idx in range(len(problem.traffic)):
        weights = problem.weights(layer_idx)
        held = np.zeros((problem.num_experts, problem.num_instances), bool)
        for experts, instances in _node_shares(problem, weights):
            slots = [problem.slots[n] for n in instances]
            replicas = replicate(weights[experts], slots)
            board = Board(len(experts), slots)
            _pack(board, weights[experts], replicas)
            held[np.ix_(experts, instances)] = board.held
        placed.append(as_slots(held, problem.slots))
    return placed


def eplb_by_batches(problem: Problem) -> list[Slots]:
    """As ``eplb``, balancing in how many batches experts are active instead of their rows."""
    return eplb(replace(problem, statistic="batches"))


def _node_shares(
    problem: Problem, weights: Floats
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Which experts go to which instances, before these are told apart."""
    everything = np.arange(problem.num_experts), np.arange(problem.num_instances)
    if problem.nodes is None:
        return [everything]
    nodes = sorted(set(problem.nodes))
    of_node = [np.flatnonzero(np.array(problem.nodes) == node) for node in nodes]
    room = {sum(min(problem.slots[n], problem.num_experts) for n in mine) for mine in of_node}
    per_node, rest = divmod(problem.num_groups, len(nodes))
    group_size, uneven = divmod(problem.num_experts, problem.num_groups)
    if rest or uneven or len(room) > 1 or room.pop() < per_node * group_size:
        return [everything]
    groups = Board(problem.num_groups, [per_node] * len(nodes))
    group_rows = weights.reshape(problem.num_groups, group_size).sum(axis=1)
    _pack(groups, group_rows, np.ones(problem.num_groups, np.int64))
    experts = np.arange(problem.num_experts).reshape(problem.num_groups, group_size)
    return [(experts[groups.held[:, idx]].flatten(), mine) for idx, mine in enumerate(of_node)]


def _pack(board: Board, weights: Floats, replicas: Counts) -> None:
    """Each replica, those with most rows first, to the instance with fewest rows that has room."""
    rows = weights / replicas  # of one replica
    order = np.lexsort((np.arange(len(weights)), -rows))
    for expert in np.repeat(order, replicas[order]).tolist():
        chosen = board.cheapest(expert, rows @ board.held)
        if chosen is None:
            board.make_room(expert)
        else:
            board.put(expert, chosen)
