"""Policies that keep rows where they come from: fewest calls to other instances.

They matter where every instance has traffic of its own, as edge servers do. ``Problem.demand`` says
what comes from where; without it all instances want the same experts.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.placement.problem import Problem, as_slots
from moesaic.placement.replication import Board, Counts, fill_up
from moesaic.placement.statistics import Floats
from moesaic.placement.uniform import Slots

if TYPE_CHECKING:
    from types import ModuleType


def dance(problem: Problem) -> list[Slots]:
    """DanceMoE's heuristic: more slots for layers of even demand, then the experts in demand.

    Section III, algorithms 1 and 2. What its pseudo-code leaves open: an instance without traffic
    takes the mean entropy of the others; what a layer cannot use goes to the instance's other
    layers; experts that nobody holds replace, one by one, the duplicate whose loss costs least.

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


def layer_counts(problem: Problem) -> Counts:
    """How many experts each instance holds of each layer, ``[N, L]`` (algorithm 1).

    Without ``problem.pooled`` every layer has the same slots, and there is nothing to divide.
    """
    num_layers, num_experts = len(problem.traffic), problem.num_experts
    room = np.minimum(np.asarray(problem.slots), num_experts)
    if not problem.pooled:
        return np.repeat(room[:, None], num_layers, axis=1)
    entropy = _entropies(problem)
    counts = np.stack(
        [
            _divided(int(count) * num_layers, shares, num_experts)
            for count, shares in zip(problem.slots, entropy, strict=True)
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


def _entropies(problem: Problem) -> Floats:
    """Of each instance's demand in each layer, in bits, ``[N, L]``."""
    demand = np.stack([problem.demand_of(i) for i in range(len(problem.traffic))], axis=1)
    total = demand.sum(axis=2, keepdims=True)
    share = np.divide(demand, total, out=np.zeros_like(demand), where=total > 0)
    logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
    entropy: Floats = -(share * logs).sum(axis=2)
    silent = demand.sum(axis=(1, 2)) == 0
    if silent.any() and not silent.all():
        entropy[silent] = entropy[~silent].mean(axis=0)
    entropy[entropy.sum(axis=1) == 0] = 1.0  # equal shares
    return entropy


def _divided(budget: int, shares: Floats, most: int) -> Counts:
    """``budget`` in proportion to ``shares``, none above ``most``, by largest remainder."""
    budget = min(budget, most * len(shares))
    counts = np.zeros(len(shares), np.int64)
    while (left := budget - int(counts.sum())) > 0:
        open_ = np.where(counts < most, shares, 0.0)
        if open_.sum() == 0:
            open_ = (counts < most).astype(np.float64)
        exact = left * open_ / open_.sum()
        whole = np.minimum(np.floor(exact).astype(np.int64), most - counts)
        if not whole.any():
            rest = np.lexsort((np.arange(len(shares)), -np.where(counts < most, exact, -1.0)))
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


def optimal(problem: Problem) -> list[Slots]:
    """The fewest remote calls there can be, weighed by their cost.

    Choosing who holds what, so that every expert is held and no instance has too many, is a
    b-matching with lower bounds: its linear program has an integral optimum, which HiGHS finds.

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


def remote_calls(placed: list[Slots], demand: Floats) -> float:
    """Rows that need an expert which the instance they come from does not hold.

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
