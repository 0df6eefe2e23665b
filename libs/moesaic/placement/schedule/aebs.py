"""Activated-expert-balanced scheduling: a replica for each activated expert of one batch.

AEBS (JANUS section 3.3, algorithm 1). While an expert layer is bound by memory, an instance's time
grows with its distinct activated experts and not with their tokens. So the largest of these counts is
kept small. Nothing is random and every tie is broken by id: workers that see the same rows decide
alike, and need not ask each other. ``moesaic.kernels.aebs`` does the same on tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.messages.placement import EMPTY_SLOT

Array = TypeVar("Array")

NONE = -1  # no replica here; no instance, since the expert is not activated
UNAVAILABLE = -2  # no instance, though the expert is activated: no live one holds it


@dataclass(frozen=True)
class Costs(Generic[Array]):
    """Costs of an activated expert on each instance, in any one integer unit (say, nanoseconds).

    Reading its weights and computing its rows overlap, so its cost is the longer of the two. Integers,
    because all workers must come to the same sums.
    """

    weights: Array  # int64 [N]: to read an expert's weights once
    row: Array  # int64 [N]: to compute one row; 0 where only memory counts


@dataclass(frozen=True)
class Schedule(Generic[Array]):
    """An instance for each activated expert of one batch in one layer."""

    replica: Array  # int32 [E]: the physical id; -1 where not activated, or unavailable
    instance: Array  # int32 [E]: its instance; -1 where not activated, -2 where unavailable
    load: Array  # int64 [N]: carried over from other batches, and added by this one
    replica_of_choice: Array  # int32, the shape of topk_ids: its expert's replica, else -1


def memory_bound(num_instances: int) -> Costs[NDArray[np.int64]]:
    """Costs of 1 for every activated expert everywhere: then loads count experts."""
    return Costs(np.ones(num_instances, np.int64), np.zeros(num_instances, np.int64))


def replica_table(slots: Sequence[Sequence[int]], num_experts: int) -> NDArray[np.int32]:
    """Number the replicas of a layer's experts.

    Args:
        slots: for each instance, the expert in each of its slots; -1 is an empty slot.
        num_experts: experts of the layer, E.

    Returns:
        int32 ``[E, N]``: the physical replica id of an expert on an instance, -1 where it has none.
        Slots are numbered through, instance by instance; of two copies on one instance the first
        counts.
    """
    table = np.full((num_experts, len(slots)), NONE, np.int32)
    replica_id = 0
    for instance, experts in enumerate(slots):
        for expert in experts:
            if expert != EMPTY_SLOT and table[expert, instance] == NONE:
                table[expert, instance] = replica_id
            replica_id += 1
    return table


def live_replicas(replicas: NDArray[np.int32], live: ArrayLike | None) -> NDArray[np.int32]:
    """Drop the replicas on instances that do not live.

    Args:
        replicas: from ``replica_table``, ``[E, N]``.
        live: bool ``[N]``; None means all live.
    """
    return replicas if live is None else np.where(np.asarray(live, bool), replicas, np.int32(NONE))


def schedule_experts(
    topk_ids: NDArray[Any],
    replicas: NDArray[np.int32],
    *,
    live: ArrayLike | None = None,
    load: ArrayLike | None = None,
    costs: Costs[NDArray[np.int64]] | None = None,
) -> Schedule[NDArray[Any]]:
    """Choose one live replica for every activated expert, so that the largest load is small.

    1. Experts with one live replica have no choice and go first.
    2. The others follow, fewest live replicas first and then by id. Each goes to the holder whose load
       with it is least, ties to the lowest instance. Where an expert costs every instance the same,
       the largest load is then at most ``ceil(log2 N) + 1`` times the least possible (Azar, Naor, Rom:
       the competitiveness of on-line assignments).
    3. If all experts with a choice cost the same everywhere, as they do while only memory counts, the
       largest load is then lowered to the least possible. Experts move from an instance with the largest
       load, one making room for the next, to an instance that stays below it with one expert more.
       (The paper stops before this.) Elsewhere finding the least is NP-hard, and step 2 stands.

    Args:
        topk_ids: any integer, ``[T, k]``: the experts of each row; an id outside ``0..E-1`` chooses
            nothing.
        replicas: from ``replica_table``, ``[E, N]``.
        live: bool ``[N]``, instances that may serve; None means all.
        load: int64 ``[N]``, work that each still has, in the unit of ``costs``; None means none.
        costs: None means ``memory_bound``. None is negative; all costs and loads of a batch add up
            below 2**62.
    """
    num_experts = len(replicas)
    tokens = expert_tokens(topk_ids, num_experts)
    instance, loads = schedule_rows(tokens, replicas, live=live, load=load, costs=costs)
    held, serving = live_replicas(replicas, live), np.maximum(instance, 0)
    replica = np.where(instance >= 0, held[np.arange(num_experts), serving], np.int32(NONE))
    return Schedule(replica, instance, loads, replica_of_choice(topk_ids, replica))


def schedule_rows(
    tokens: NDArray[np.int64],
    replicas: NDArray[np.int32],
    *,
    live: ArrayLike | None = None,
    load: ArrayLike | None = None,
    costs: Costs[NDArray[np.int64]] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Schedule as ``schedule_experts`` does, from the number of rows of each expert.

    Args:
        tokens: int64 ``[E]``.
        replicas: and all others as of ``schedule_experts``.

    Returns:
        ``instance`` and ``load`` of the schedule.
    """
    num_instances = replicas.shape[1]
    costs = costs or memory_bound(num_instances)
    lives = np.ones(num_instances, bool) if live is None else np.asarray(live, bool)
    held = live_replicas(replicas, lives)
    price = np.maximum(costs.weights, tokens[:, None] * costs.row)  # [E, N]
    instance = np.where(tokens > 0, UNAVAILABLE, NONE).astype(np.int32)
    # Lists: numpy is slow at one number at a time.
    loads: list[int] = [0] * num_instances if load is None else np.asarray(load).tolist()
    held_by, price_of = held.tolist(), price.tolist()
    for expert in _in_turn(tokens, held):
        least, chosen = min(
            (load_of_n + price_of_n, n)
            for n, (replica_id, load_of_n, price_of_n) in enumerate(
                zip(held_by[expert], loads, price_of[expert], strict=True)
            )
            if replica_id >= 0
        )
        loads[chosen], instance[expert] = least, chosen
    final = np.asarray(loads, np.int64)
    has_choice = (tokens > 0) & ((held >= 0).sum(axis=1) > 1)
    prices = price[(held >= 0) & has_choice[:, None]]
    if len(prices) and prices.min() == prices.max() > 0:
        _improve(instance, final, held >= 0, lives, int(prices[0]))
    return instance, final


def _improve(
    instance: NDArray[np.int32],
    load: NDArray[np.int64],
    held: NDArray[np.bool_],
    lives: NDArray[np.bool_],
    price: int,
) -> None:
    """Lower the largest load to the least possible, in place.

    A search from an instance with the largest load reaches every instance that could take an expert
    from a reached one. If one of them would stay below the largest load, experts move along the way to
    it. If none would, the experts of the reached instances fit nowhere else, and no schedule is better.
    Of all choices the one of the lowest id is taken.
    """
    while True:
        highest = load.max(where=lives, initial=-1)
        start = int(np.flatnonzero(lives & (load == highest))[0])
        reached = np.arange(len(load)) == start
        # Which expert would move here.
        came = np.full(len(load), NONE)
        while True:
            movable = reached[np.maximum(instance, 0)] & (instance >= 0)
            takers = held & movable[:, None] & ~reached
            new = takers.any(axis=0)
            came[new] = takers.argmax(axis=0)[new]
            reached |= new
            room = np.flatnonzero(reached & (load + price < highest))
            if len(room) or not new.any():
                break
        if not len(room):
            return
        target = int(room[load[room].argmin()])
        load[target] += price
        load[start] -= price
        while target != start:
            expert = came[target]
            target, instance[expert] = int(instance[expert]), target


def expert_tokens(topk_ids: NDArray[Any], num_experts: int) -> NDArray[np.int64]:
    """Count the choices of each expert, int64 ``[E]``; ids outside ``0..E-1`` are left out."""
    real = topk_ids[(topk_ids >= 0) & (topk_ids < num_experts)]
    return np.bincount(real, minlength=num_experts).astype(np.int64)


def replica_of_choice(topk_ids: NDArray[Any], replica: NDArray[np.int32]) -> NDArray[np.int32]:
    """``replica[topk_ids]``, -1 where an id is no expert."""
    real = (topk_ids >= 0) & (topk_ids < len(replica))
    return np.where(real, replica[np.where(real, topk_ids, 0)], np.int32(NONE))


def _in_turn(tokens: NDArray[np.int64], held: NDArray[np.int32]) -> list[int]:
    """The activated experts that have a replica, in the order in which they choose."""
    num_replicas = (held >= 0).sum(axis=1)
    experts = np.flatnonzero((tokens > 0) & (num_replicas > 0))
    chosen: list[int] = experts[np.argsort(num_replicas[experts], kind="stable")].tolist()
    return chosen
