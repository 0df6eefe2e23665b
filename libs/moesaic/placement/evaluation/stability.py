"""Stability: experts stay where they are as far as that costs a new placement nothing."""

from collections.abc import Sequence

import numpy as np

from moesaic.messages.placement import EMPTY_SLOT
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats


def settle(
    current: Sequence[Slots], wanted: Sequence[Slots], alike: Sequence[object] | None = None
) -> list[Slots]:
    """Arrange a wanted placement so that the fewest replicas have to be loaded.

    Instances of one kind may swap their sets of experts without a difference to a placement. So in
    each layer sets are dealt anew among instances that are alike, and an expert that stays on an
    instance keeps its slot.

    Args:
        current: ``[L][N][slots]``, experts that instances hold now; empty for a newcomer.
        wanted: ``[L][N][slots]``, from a policy.
        alike: ``[N]``, equal for instances that may swap their sets; None takes those with equally
            many slots. Instances that differ in node, speed or demand are not alike.

    Returns:
        ``[L][N][slots]``: the same sets, each on an instance that is like the wanted one.
    """
    return [
        _settle_layer(now, then, alike or [len(slots) for slots in then])
        for now, then in zip(current, wanted, strict=True)
    ]


def _settle_layer(current: Slots, wanted: Slots, alike: Sequence[object]) -> Slots:
    sets: Slots = [list(slots) for slots in wanted]
    for kind in dict.fromkeys(alike):
        mine = [n for n, other in enumerate(alike) if other == kind]
        kept = np.array(
            [[_kept(current[n], wanted[m], len(wanted[n])) for m in mine] for n in mine]
        )
        for n, m in zip(mine, _best_match(-kept), strict=True):
            sets[n] = _fitted(wanted[mine[m]], len(wanted[n]))
    return [_in_place(now, then) for now, then in zip(current, sets, strict=True)]


def _kept(now: Sequence[int], then: Sequence[int], num_slots: int) -> float:
    """Count the experts that need not be loaded; nearly minus infinity if the set does not fit."""
    staying = set(then) - {EMPTY_SLOT}
    return len(staying & set(now)) if len(staying) <= num_slots else -1e9


def _fitted(slots: Sequence[int], num_slots: int) -> list[int]:
    experts = [expert for expert in slots if expert != EMPTY_SLOT]
    return experts + [EMPTY_SLOT] * (num_slots - len(experts))


def _in_place(now: Sequence[int], then: Sequence[int]) -> list[int]:
    """Arrange ``then`` so that as many slots as possible keep their expert."""
    arranged = [EMPTY_SLOT] * len(then)
    coming = [expert for expert in then if expert != EMPTY_SLOT]
    for slot, expert in enumerate(now[: len(then)]):
        if expert in coming:
            arranged[slot] = expert
            coming.remove(expert)
    free = (slot for slot, expert in enumerate(arranged) if expert == EMPTY_SLOT)
    for slot, expert in zip(free, coming, strict=False):
        arranged[slot] = expert
    return arranged


def loads(current: Sequence[Slots], then: Sequence[Slots]) -> int:
    """Count the replicas that instances must load to get from one placement to another."""
    return sum(
        len(set(after) - set(before) - {EMPTY_SLOT})
        for layers in zip(current, then, strict=True)
        for before, after in zip(*layers, strict=True)
    )


def _best_match(cost: Floats) -> list[int]:
    """Find the cheapest perfect matching of a square matrix (Kuhn, Munkres).

    Rows are added one by one, each along the cheapest path of swaps. Row and column potentials keep
    matched pairs at no reduced cost. Column 0 is the row that is being added.

    Returns:
        The column of each row.
    """
    size = len(cost)
    row_price, column_price = np.zeros(size + 1), np.zeros(size + 1)
    # Of each column, counted from 1; 0 is none.
    row_of = np.zeros(size + 1, np.int64)
    for row in range(1, size + 1):
        row_of[0] = row
        column = 0
        best = np.full(size + 1, np.inf)
        came = np.zeros(size + 1, np.int64)
        done = np.zeros(size + 1, bool)
        while row_of[column]:
            done[column] = True
            reduced = cost[row_of[column] - 1] - row_price[row_of[column]] - column_price[1:]
            nearer = ~done[1:] & (reduced < best[1:])
            best[1:][nearer] = reduced[nearer]
            came[1:][nearer] = column
            following = int(np.where(done, np.inf, best).argmin())
            step = best[following]
            row_price[row_of[done]] += step
            column_price[done] -= step
            best[~done] -= step
            column = following
        while column:
            row_of[column] = row_of[came[column]]
            column = int(came[column])
    columns = np.zeros(size, np.int64)
    columns[row_of[1:] - 1] = np.arange(size)
    return [int(column) for column in columns]
