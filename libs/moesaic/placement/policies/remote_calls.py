"""Calls to other instances that a placement needs, and the fewest there can be."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Board, Counts, fill_up
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats

if TYPE_CHECKING:
    from types import ModuleType


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


def optimal(problem: PlacementProblem) -> list[Slots]:
    """Place for the fewest remote calls there can be, weighed by their cost.

    Every expert must be held, and no instance hold too many: that is a b-matching with lower bounds.
    Its linear program has an integral optimum, which HiGHS finds.

    Raises:
        InvalidInput: scipy is not installed.
        PlacementInfeasible: the slots cannot hold every expert.
    """
    optimize, sparse = _scipy()
    problem.require_room()
    demand = [problem.demand_of(layer_idx) for layer_idx in range(len(problem.traffic))]
    if problem.pooled:
        budget = np.asarray(problem.slots) * len(demand)
        held = _solved(optimize, sparse, np.stack(demand), budget)
        return [as_slots(layer, layer.sum(axis=0)) for layer in held]
    placed = []
    for layer_idx, wanted in enumerate(demand):
        (chosen,) = _solved(optimize, sparse, wanted[None], np.asarray(problem.slots))
        board = Board(problem.num_experts, problem.slots)
        for expert, n in np.argwhere(chosen).tolist():
            board.put(expert, n)
        fill_up(board, problem.weights(layer_idx))
        placed.append(as_slots(board.held, problem.slots))
    return placed


def _scipy() -> "tuple[ModuleType, ModuleType]":
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        fix = "'optimal' needs scipy: pip install 'moesaic[placement]'"
        raise InvalidInput("policy", fix) from error
    return optimize, sparse


def _solved(optimize: Any, sparse: Any, demand: Floats, budget: Counts) -> NDArray[np.bool_]:
    """Solve for the layers of ``demand`` ``[L, N, E]`` that share ``budget`` ``[N]``.

    Returns:
        bool ``[L, E, N]``.
    """
    num_layers, num_instances, num_experts = demand.shape
    variable = np.arange(demand.size).reshape(demand.shape)
    ones = np.ones(demand.size)
    instance = np.broadcast_to(np.arange(num_instances)[:, None], demand.shape)
    expert = np.arange(num_layers)[:, None, None] * num_experts + np.arange(num_experts)
    expert = np.broadcast_to(expert, demand.shape)
    columns = variable.flatten()
    used = sparse.csr_array((ones, (instance.flatten(), columns)))
    copies = sparse.csr_array((ones, (expert.flatten(), columns)))
    largest = max(float(demand.max()), 1e-300)
    found = optimize.linprog(
        -demand.flatten() / largest,
        A_ub=sparse.vstack([used, -copies]),
        b_ub=np.concatenate([budget, -np.ones(num_layers * num_experts)]),
        bounds=(0, 1),
        method="highs",
    )
    assert found.status == 0, found.message
    chosen: NDArray[np.bool_] = found.x.reshape(demand.shape).transpose(0, 2, 1) > 0.5
    assert chosen.any(axis=2).all()
    assert (chosen.sum(axis=(0, 1)) <= budget).all()
    return chosen
