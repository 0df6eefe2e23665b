"""Numbers of replicas, and a board on which these are placed."""

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import PlacementInfeasible
from moesaic.placement.traffic.statistics import Floats

Counts = NDArray[np.int64]


def replicate(weights: Floats, slots: Sequence[int]) -> Counts:
    """Give every expert a replica, and each further slot to the expert with most weight per replica.

    JANUS section 3.4, with a cap that the paper leaves out: an expert has at most one replica on each
    instance, as a second one is of no use. Where instances differ in slots, an
    expert also gets no replica that could not be placed beside the others. Slots that no expert may
    take stay empty: ``sum(slots)`` less the sum of the answer.

    Args:
        weights: ``[E]``, not negative: rows of each expert, or batches in which it was active.
        slots: of each instance, ``[N]``.

    Returns:
        ``[E]``, each in ``1..N``; ties go to the lowest id, and among experts without weight to the
        one with fewest replicas.

    Raises:
        PlacementInfeasible: there are fewer slots than experts; the bytes are not known here.
    """
    num_experts = len(weights)
    room = _room(num_experts, slots)
    if room[-1] < num_experts:
        raise PlacementInfeasible(num_experts - int(room[-1]), 0)
    replicas = np.ones(num_experts, np.int64)
    # Then the cap is all there is to heed.
    alike = len(set(slots)) == 1
    heap = [(-float(weight), 1, expert) for expert, weight in enumerate(weights)]
    heapq.heapify(heap)
    left = int(room[-1]) - num_experts
    while left and heap:
        _, _, expert = heapq.heappop(heap)
        if replicas[expert] == len(slots):
            continue
        replicas[expert] += 1
        if not alike and not _fit(replicas, room):
            # Nor will it fit later, beside more replicas of others.
            replicas[expert] -= 1
            continue
        left -= 1
        weight, count = float(weights[expert]), int(replicas[expert])
        heapq.heappush(heap, (-weight / count, count if weight == 0 else 1, expert))
    return replicas


def _room(num_experts: int, slots: Sequence[int]) -> Counts:
    """Room for replicas of any ``m`` experts, for each ``m`` in ``1..E``."""
    most = np.arange(1, num_experts + 1)
    room: Counts = np.minimum(np.asarray(slots)[:, None], most).sum(axis=0)
    return room


def _fit(replicas: Counts, room: Counts) -> bool:
    """True if the replicas can be placed, each expert's on different instances (Gale, Ryser)."""
    return bool((np.sort(replicas)[::-1].cumsum() <= room).all())


class Board:
    """One layer's instances while replicas are placed on them.

    Attributes:
        held: bool ``[E, N]``, True where an instance holds an expert.
        free: ``[N]``, slots that are empty.
    """

    def __init__(self, num_experts: int, slots: Sequence[int]) -> None:
        """Start with empty slots, ``[N]``."""
        self.held = np.zeros((num_experts, len(slots)), bool)
        self.free = np.asarray(slots, np.int64).copy()
        self._used = np.zeros(len(slots), np.int64)

    def cheapest(self, expert: int, cost: Floats) -> int | None:
        """Find the instance with room that lacks ``expert`` and where it costs least.

        Ties go to the instance with fewest slots in use, then to the lowest. ``cost``: ``[N]``.
        """
        feasible = np.flatnonzero((self.free > 0) & ~self.held[expert])
        if not len(feasible):
            return None
        order = np.lexsort((feasible, self._used[feasible], cost[feasible]))
        return int(feasible[order[0]])

    def put(self, expert: int, instance: int) -> None:
        """Fill a slot of ``instance``."""
        assert self.free[instance] > 0
        assert not self.held[expert, instance]
        self.held[expert, instance] = True
        self.free[instance] -= 1
        self._used[instance] += 1

    def swap_in(self, expert: int, leaving: int, instance: int, elsewhere: int) -> None:
        """Put ``expert`` in the place of ``leaving``, which moves ``elsewhere``."""
        assert self.held[leaving, instance]
        assert not self.held[expert, instance]
        self.held[leaving, instance] = False
        self.held[expert, instance] = True
        self.put(leaving, elsewhere)

    def make_room(self, expert: int) -> list[tuple[int, int]]:
        """Put ``expert`` on an instance though all that lack it are full: as few others as possible move.

        Returns:
            Experts with their new instances: ``expert`` first, then the one it displaced, and so on.

        Raises:
            PlacementInfeasible: no moves make room.
        """
        came: dict[
            int, tuple[int, int] | None
        ] = {}  # instance: (instance before, expert that moves)
        queue = deque(np.flatnonzero(~self.held[expert]).tolist())
        came.update(dict.fromkeys(queue))
        while queue:
            here = queue.popleft()
            if self.free[here] > 0:
                return self._move_along(expert, here, came)
            for leaving in np.flatnonzero(self.held[:, here]).tolist():
                for there in np.flatnonzero(~self.held[leaving]).tolist():
                    if there not in came:
                        came[there] = (here, leaving)
                        queue.append(there)
        raise PlacementInfeasible(1, 0)

    def _move_along(
        self, expert: int, end: int, came: dict[int, tuple[int, int] | None]
    ) -> list[tuple[int, int]]:
        self.free[end] -= 1
        self._used[end] += 1
        moves, here = [], end
        while (step := came[here]) is not None:
            before, leaving = step
            self.held[leaving, before] = False
            self.held[leaving, here] = True
            moves.append((leaving, here))
            here = before
        self.held[expert, here] = True
        return [(expert, here), *reversed(moves)]


def fill_up(board: Board, weights: Floats) -> None:
    """Fill empty slots, each with the expert that has most weight per replica and is not there yet.

    Ties go to the lowest id. Slots that no expert may take stay empty.
    """
    for instance in range(len(board.free)):
        while board.free[instance] > 0 and not board.held[:, instance].all():
            per_replica = weights / np.maximum(board.held.sum(axis=1), 1)
            lacking = np.where(board.held[:, instance], -1.0, per_replica)
            board.put(int(lacking.argmax()), instance)
