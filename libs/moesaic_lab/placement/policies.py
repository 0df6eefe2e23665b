"""Policies to compare with, for the product by entry points ``moesaic.placement_policies``."""

import numpy as np

from moesaic.placement.policies import POLICIES, Policy
from moesaic.placement.policies import uniform as dealt
from moesaic.placement.policies.eplb import pack
from moesaic.placement.policies.janus import janus
from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Board, Counts, fill_up
from moesaic.placement.policies.room import slots_by_layer
from moesaic.placement.policies.uniform import Slots


def uniform(problem: PlacementProblem) -> list[Slots]:
    """Deal the experts round and round, without regard to the traffic."""
    return [
        layer
        for slots in slots_by_layer(problem)
        for layer in dealt.uniform(problem.num_experts, 1, slots)
    ]


def redundance(problem: PlacementProblem) -> list[Slots]:
    """Place one replica of each expert at random, then random ones up to every slot.

    The baseline of DanceMoE section IV. Drawn with a fixed seed, another one for each layer.
    """
    placed = []
    for layer_idx, slots in enumerate(slots_by_layer(problem)):
        rng = np.random.default_rng([0, layer_idx])
        board = Board(problem.num_experts, slots)
        for expert in rng.permutation(problem.num_experts).tolist():
            board.put(expert, _drawn(board, expert, rng))
        fill_up(board, rng.random(problem.num_experts))
        placed.append(as_slots(board.held, slots))
    return placed


def _drawn(board: Board, expert: int, rng: np.random.Generator) -> int:
    lacking = (board.free > 0) & ~board.held[expert]
    return int(rng.choice(np.flatnonzero(lacking)))


def smartmoe(problem: PlacementProblem) -> list[Slots]:
    """Place one replica of each expert, about equally many experts and rows on every instance.

    The placement that SmartMoE (USENIX ATC 2023) searches for, as DanceMoE section IV uses it: no
    replicas, so slots beyond one for each expert stay empty. Experts with most rows choose first, each
    the instance with fewest rows among those that still lack experts.
    """
    placed = []
    for layer_idx, slots in enumerate(slots_by_layer(problem)):
        parts = _parts(problem.num_experts, slots)
        board = Board(problem.num_experts, parts.tolist())
        weights = problem.weights(layer_idx)
        pack(board, weights, np.ones(problem.num_experts, np.int64))
        placed.append(as_slots(board.held, slots))
    return placed


def _parts(num_experts: int, slots: tuple[int, ...]) -> Counts:
    """Divide ``num_experts`` into a part for each instance, in proportion to its slots."""
    room = np.minimum(np.asarray(slots), num_experts)
    exact = num_experts * room / room.sum()
    parts: Counts = np.floor(exact).astype(np.int64)
    largest = np.lexsort((np.arange(len(slots)), -(exact - parts)))
    parts[largest[: num_experts - int(parts.sum())]] += 1
    return parts


def unscaled(problem: PlacementProblem) -> list[Slots]:
    """Place as ``janus`` does, with the paper's own co-activation."""
    return janus(problem, scaled=False)


BASELINES: dict[str, Policy] = {
    "uniform": uniform,
    "redundance": redundance,
    "smartmoe": smartmoe,
    "janus": janus,  # by rows, as in the paper
    "janus-unscaled": unscaled,
}
ALL_POLICIES: dict[str, Policy] = {**BASELINES, **POLICIES}
