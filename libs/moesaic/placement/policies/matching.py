"""Holders of most worth, with every expert held: a b-matching with lower bounds, solved exactly.

Instances first take what is worth most to them, which is the optimum if experts may go without a
holder. Then each expert that has none gets one along the cheapest chain of changes: an instance takes
it and gives up another expert, which the next instance takes. The chain ends at an expert that others
hold too. These chains are shortest paths of a minimum-cost flow, so every step keeps the optimum (Ahuja,
Magnanti, Orlin: Network Flows, section 9.7). All costs are integers: ties are ties on every machine.
"""

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import PlacementInfeasible
from moesaic.placement.policies.replication import Counts
from moesaic.placement.traffic.statistics import Floats

Held = NDArray[np.bool_]

WORTH_BITS = 46  # of the largest worth: a chain over 2**12 holders stays below UNREACHABLE
UNREACHABLE = 2**60
REACHABLE = 2**59  # what is above has UNREACHABLE in it


def whole_worth(worth: Floats) -> Counts:
    """Round to whole numbers of at most ``WORTH_BITS`` bits, by a power of two: counts stay exact.

    Args:
        worth: not negative, any shape.
    """
    largest = float(worth.max(initial=0.0))
    shift = WORTH_BITS - int(np.frexp(largest)[1])
    return np.rint(np.ldexp(worth, shift)).astype(np.int64)


def best_holders(worth: Counts, ties: Floats, budget: Counts, most: Counts) -> Held:
    """Choose the holders of most worth, such that every expert has one.

    Args:
        worth: ``[G, E, N]``, not negative: of an expert of a group to an instance that holds it.
        ties: ``[G, E]``: of what is worth the same, instances take what is larger here, then lower.
        budget: experts that each instance may hold, ``[N]``.
        most: experts of one group that each instance may hold, ``[N]``.

    Returns:
        bool ``[G, E, N]``; instances are full, as far as they lack experts.

    Raises:
        PlacementInfeasible: some expert finds no holder; the bytes are not known here.
    """
    holders = _Holders(worth, _of_most_worth(worth, ties, budget, most), budget, most)
    for group, expert in np.argwhere(holders.copies == 0).tolist():
        holders.cover(group, expert)
    return holders.held.transpose(0, 2, 1)


def _of_most_worth(worth: Counts, ties: Floats, budget: Counts, most: Counts) -> Held:
    """Let each instance take what is worth most to it, ``[G, N, E]``."""
    num_groups, num_experts, num_instances = worth.shape
    held = np.zeros((num_groups, num_instances, num_experts), bool)
    for n in range(num_instances):
        order = np.lexsort((-ties.ravel(), -worth[:, :, n].ravel()))
        group = order // num_experts
        by_group = np.argsort(group, kind="stable").reshape(num_groups, num_experts)
        allowed = np.zeros(len(order), bool)
        allowed[by_group[:, : most[n]]] = True
        taken = order[allowed][: budget[n]]
        held[taken // num_experts, n, taken % num_experts] = True
    return held


class _Holders:
    """Holders of every item, and the cost of making room on every instance.

    Attributes:
        held: ``[G, N, E]``.
        copies: of each expert, ``[G, E]``.
    """

    def __init__(self, worth: Counts, held: Held, budget: Counts, most: Counts) -> None:
        num_groups, _, num_instances = worth.shape
        shape = num_groups, num_instances
        self.held, self.copies = held, held.sum(axis=1)
        self._worth = worth
        used = held.sum(axis=2)  # [G, N]
        self._free, self._left = budget - used.sum(axis=0), most - used
        # The copy that an instance gives up most cheaply, [G, N], and what the loss is.
        self._spare, self._spare_loss = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        # The only copy that moves most cheaply, [N to, G, N from], and what the loss is.
        self._moved = np.zeros((num_instances, *shape), np.int64)
        self._move_loss = np.zeros((num_instances, *shape), np.int64)
        for group, n in np.ndindex(shape):
            self._refresh(group, n)

    def cover(self, group: int, expert: int) -> None:
        """Give an expert without a holder one, at the least loss."""
        room, full, giving, via = self._search()
        cost = room[group] - self._worth[group, expert]
        n = int(cost.argmin())
        if cost[n] >= REACHABLE:
            raise PlacementInfeasible(1, 0)
        self.copies[group, expert] += 1
        changed = set()
        while True:
            self.held[group, n, expert] = True
            self._left[group, n] -= 1
            changed.add((group, n))
            if not full[group, n]:
                if self._free[n] > 0:
                    self._free[n] -= 1
                    break
                group = int(giving[n])
            following = int(via[group, n])
            last = following < 0
            expert = int(self._spare[group, n] if last else self._moved[following, group, n])
            self.held[group, n, expert] = False
            self._left[group, n] += 1
            changed.add((group, n))
            if last:
                self.copies[group, expert] -= 1
                if self.copies[group, expert] == 1:
                    changed.add((group, int(self.held[group, :, expert].argmax())))
                break
            n = following
        for place in changed:
            self._refresh(*place)

    def _search(self) -> tuple[Counts, Held, Counts, Counts]:
        """Find the cheapest way for every instance to make room (Bellman, Ford).

        Returns:
            The loss, ``[G, N]``, and True where a group is full, ``[G, N]``. Then the group in which an
            instance gives up an expert, ``[N]``, and the next instance of the chain, -1 at its end, ``[G, N]``.
        """
        full = self._left == 0
        loss = self._spare_loss.copy()
        via = np.full(loss.shape, -1)
        giving = loss.argmin(axis=0)
        anywhere = np.where(self._free > 0, 0, loss.min(axis=0))
        room = np.where(full, loss, anywhere)
        changed = np.arange(len(anywhere))
        while len(changed):
            through = self._move_loss[changed] + room.T[changed, :, None]  # [changed, G, N]
            found = through.min(axis=0)
            better = found < np.minimum(loss, REACHABLE)
            loss[better] = found[better]
            via[better] = changed[through[:, better].argmin(axis=0)]
            lowest = loss.min(axis=0)
            lower = lowest < anywhere
            giving[lower] = loss[:, lower].argmin(axis=0)
            anywhere[lower] = lowest[lower]
            before, room = room, np.where(full, loss, anywhere)
            changed = np.flatnonzero((room < before).any(axis=0))
        return room, full, giving, via

    def _refresh(self, group: int, n: int) -> None:
        """Find again what an instance gives up, or hands to another, most cheaply."""
        mine = np.flatnonzero(self.held[group, n])
        worth = self._worth[group, mine, n]
        copied = self.copies[group, mine] > 1
        self._spare_loss[group, n] = UNREACHABLE
        self._move_loss[:, group, n] = UNREACHABLE
        if copied.any():
            cheapest = int(np.where(copied, worth, UNREACHABLE).argmin())
            self._spare[group, n] = mine[cheapest]
            self._spare_loss[group, n] = worth[cheapest]
        # To hand on what is worth more than a copy cannot be cheaper: no taker gains by it, or it
        # would hold it already.
        movable = ~copied & (worth < self._spare_loss[group, n])
        only = mine[movable]
        if len(only):
            losses = worth[movable][:, None] - self._worth[group, only]  # [only, N]
            best = losses.argmin(axis=0)
            self._moved[:, group, n] = only[best]
            self._move_loss[:, group, n] = losses[best, np.arange(losses.shape[1])]
            self._move_loss[n, group, n] = UNREACHABLE
