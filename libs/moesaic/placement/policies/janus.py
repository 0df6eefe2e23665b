"""Placement that spreads experts which are active together (JANUS section 3.4, algorithm 2).

Three things differ from the paper:

- Its line 18 forgets that the instance which takes in the moved expert has a slot less; as printed an
  instance can be over-filled. Here that slot is counted.
- Its co-activation of two experts counts whole experts, but a replica sees only a part of the rows. So
  co-activation is divided by the numbers of replicas of both, unless ``scaled`` is False.
- It counts *rows* that choose two experts. An instance waits for the experts of a whole *batch*, though,
  and experts of different rows meet there as well: ``by_batches`` counts the batches in which two
  experts were active.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.policies.problem import PlacementProblem, as_slots
from moesaic.placement.policies.replication import Board, Counts, replicate
from moesaic.placement.policies.room import slots_by_layer
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats, LayerTraffic

MAX_SEARCH_STEPS = 200  # of the final search, for each layer
SEARCH_PARTNERS = 8  # instances with least co-activation, with which the one with most swaps


def janus(
    problem: PlacementProblem, *, scaled: bool = True, of_batches: bool = False
) -> list[Slots]:
    """Replicate by traffic, put each replica where it adds least co-activation, then swap while that helps.

    Args:
        problem: traffic and slots.
        scaled: divide co-activation by the numbers of replicas.
        of_batches: count the sampled batches in which two experts were active, not the rows.

    Raises:
        PlacementInfeasible: the slots cannot hold every expert.
    """
    placed = []
    room = slots_by_layer(problem)
    for layer_idx, (layer, slots) in enumerate(zip(problem.traffic, room, strict=True)):
        weights = problem.weights(layer_idx)
        replicas = replicate(weights, slots)
        together = coactive_batches(layer) if of_batches else layer.coactivation.astype(np.float64)
        together = np.nan_to_num(together)
        if scaled:
            together = together / np.outer(replicas, replicas)
        board = spread(weights, replicas, together, slots)
        lower_largest(board, together)
        placed.append(as_slots(board.held, slots))
    return placed


def by_batches(problem: PlacementProblem) -> list[Slots]:
    """Place as ``janus`` does, with replicas and co-activation counted by batches instead of rows."""
    return janus(replace(problem, statistic="batches"), of_batches=True)


def coactive_batches(layer: LayerTraffic) -> Floats:
    """Count the sampled batches in which two experts were active, ``[E, E]``, 0 on the diagonal."""
    active = (layer.sampled > 0).astype(np.float64)
    together: Floats = active.T @ active
    np.fill_diagonal(together, 0)
    return together


def spread(weights: Floats, replicas: Counts, together: Floats, slots: tuple[int, ...]) -> Board:
    """Algorithm 2: place the replicas, those with most weight first.

    Args:
        weights: ``[E]``.
        replicas: of each expert, ``[E]``, from ``replicate``.
        together: co-activation of two experts, ``[E, E]``, symmetric, 0 on the diagonal.
        slots: of each instance.
    """
    board = Board(len(weights), slots)
    added = np.zeros(
        board.held.shape
    )  # [E, N]: co-activation of an expert with those already there
    order = np.lexsort((np.arange(len(weights)), -weights / replicas))
    for expert in np.repeat(order, replicas[order]).tolist():
        chosen = board.cheapest(expert, added[expert])
        if chosen is not None:
            board.put(expert, chosen)
            added[:, chosen] += together[:, expert]
            continue
        swap = _cheapest_swap(board, expert, added, together)
        # Instances of different sizes may need longer moves.
        if swap is None:
            board.make_room(expert)
        else:
            board.swap_in(expert, *swap)
        added = together @ board.held
    return board


def _cheapest_swap(
    board: Board, expert: int, added: Floats, together: Floats
) -> tuple[int, int, int] | None:
    """Find the single move that makes room for ``expert`` and adds least co-activation.

    Returns:
        The expert that moves, the instance that it leaves to ``expert``, and the one that it goes to;
        None if no single move makes room.
    """
    movable = board.held & ~board.held[expert]  # [E, N]: may leave here for the expert's sake
    takers = ~board.held & (board.free > 0)  # [E, N]: may move there
    leaving, here, there = np.nonzero(movable[:, :, None] & takers[:, None, :])
    if not len(leaving):
        return None
    cost = added[expert, here] - together[expert, leaving]
    cost += added[leaving, there] - added[leaving, here]
    best = int(cost.argmin())
    return int(leaving[best]), int(here[best]), int(there[best])


def coactivation_loads(held: NDArray[np.bool_], together: Floats) -> Floats:
    """Co-activation of the experts on each instance, ``[N]``: the sum over its pairs."""
    loads: Floats = 0.5 * ((together @ held) * held).sum(axis=0)
    return loads


def lower_largest(board: Board, together: Floats, max_steps: int = MAX_SEARCH_STEPS) -> None:
    """Swap or move single experts, in place, while the largest co-activation of an instance sinks.

    Each step takes the swap between the fullest instance and one of the emptiest that leaves least on
    the fuller of the two. No step raises the largest, so the search never does.
    """
    for _ in range(max_steps):
        added = together @ board.held  # [E, N]
        loads = coactivation_loads(board.held, together)
        full = int(loads.argmax())
        best = _best_swap(board, added, together, loads, full)
        if best is None:
            return
        leaving, coming, other = best
        board.held[leaving, full], board.held[leaving, other] = False, True
        if coming is None:
            board.free[full] += 1
            board.free[other] -= 1
        else:
            board.held[coming, other], board.held[coming, full] = False, True


def _best_swap(
    board: Board, added: Floats, together: Floats, loads: Floats, full: int
) -> tuple[int, int | None, int] | None:
    """Find the best swap or move between the fullest instance and another one.

    Returns:
        The expert that leaves ``full``, the one that comes instead or None, and the other instance; None
        if nothing helps.
    """
    # Traffic may have faded to very little.
    tolerance = 1e-9 * float(loads[full])
    limit = float(loads[full]) - tolerance
    best: tuple[int, int | None, int] | None = None
    mine = np.flatnonzero(board.held[:, full])
    for other in np.argsort(loads, kind="stable")[:SEARCH_PARTNERS].tolist():
        if other == full:
            continue
        out = mine[~board.held[mine, other]]
        if not len(out):
            continue
        if board.free[other] > 0:
            left = np.maximum(loads[full] - added[out, full], loads[other] + added[out, other])
            if left.min() < limit:
                limit, best = float(left.min()), (int(out[left.argmin()]), None, other)
        theirs = np.flatnonzero(board.held[:, other] & ~board.held[:, full])
        if not len(theirs):
            continue
        between = together[np.ix_(out, theirs)]
        here = loads[full] - added[out, full][:, None] + added[theirs, full] - between
        there = loads[other] - added[theirs, other] + added[out, other][:, None] - between
        left = np.maximum(here, there)
        if left.min() < limit:
            o, t = np.unravel_index(int(left.argmin()), left.shape)
            limit, best = float(left.min()), (int(out[o]), int(theirs[t]), other)
    return best
