"""Replays of recorded traffic on a placement: the work that each batch would have meant.

A layer waits for the instance with most work. That depends on which replica serves which expert, and
workers choose it batch by batch; so batches are scheduled here as workers would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.schedule.aebs import Costs, replica_table, schedule_rows
from moesaic.placement.schedule.serving import serving_costs, serving_replicas


@dataclass(frozen=True)
class ReplayMeans:
    """Means over all batches of all layers."""

    max_load: float  # work of the fullest instance, in the unit of costs
    max_activated: float  # activated experts of the instance that has most of them
    spread: float  # ``max_activated`` less the count of the instance that has fewest
    activated: float  # experts that are active at all
    batches: int


def activated_counts(
    rows: NDArray[np.generic],
    replicas: NDArray[np.int32],
    costs: Costs[NDArray[np.int64]] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Schedule one batch by AEBS.

    Args:
        rows: of each expert, ``[E]``; where memory is all that counts, any number but 0 will do.
        replicas: from ``replica_table``, ``[E, N]``.
        costs: None means that an activated expert costs 1.

    Returns:
        Activated experts of each instance, int64 ``[N]``, and its load.
    """
    instance, load = schedule_rows(rows.astype(np.int64), replicas, costs=costs)
    counts = np.bincount(instance[instance >= 0], minlength=replicas.shape[1])
    return counts.astype(np.int64), load


def replay(
    placements: Sequence[Sequence[Slots]],
    batches: Sequence[NDArray[np.generic]],
    scheduling: ExpertScheduling = "aebs-memory-bound",
    ridges: Sequence[int] = (),
    go_on: Callable[[], bool] = lambda: True,
) -> list[ReplayMeans]:
    """Schedule the same recorded batches on each of some placements.

    Args:
        placements: each ``[L][N][slots]``.
        batches: for each of the layers, ``[B, E]``: the rows of each expert, latest batches last.
        scheduling: the way in which workers choose replicas. Baselines that choose by chance or by
            rows are taken as ``aebs-memory-bound``.
        ridges: ``ridge_rows`` of the workers, ``[N]``; needed for ``aebs`` alone.
        go_on: False ends the replay; called before each batch, the latest of all layers first.
    """
    tables = [_tables(placed, batches, scheduling) for placed in placements]
    costs = serving_costs(scheduling, ridges) if ridges else None
    tallies = [_Tally() for _ in placements]
    for back in range(1, 1 + max((len(rows) for rows in batches), default=0)):
        for layer_idx, rows in enumerate(batches):
            if back > len(rows):
                continue
            if not go_on():
                return [tally.means() for tally in tallies]
            for tally, replicas in zip(tallies, tables, strict=True):
                tally.add(*activated_counts(rows[-back], replicas[layer_idx], costs))
    return [tally.means() for tally in tallies]


def _tables(
    placed: Sequence[Slots], batches: Sequence[NDArray[np.generic]], scheduling: ExpertScheduling
) -> list[NDArray[np.int32]]:
    return [
        serving_replicas(scheduling, replica_table(slots, rows.shape[1]))
        for slots, rows in zip(placed, batches, strict=True)
    ]


@dataclass
class _Tally:
    loads: list[int] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)
    smallest: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)

    def add(self, counts: NDArray[np.int64], load: NDArray[np.int64]) -> None:
        self.loads.append(int(load.max()))
        self.largest.append(int(counts.max()))
        self.smallest.append(int(counts.min()))
        self.active.append(int(counts.sum()))

    def means(self) -> ReplayMeans:
        if not self.loads:
            return ReplayMeans(0.0, 0.0, 0.0, 0.0, 0)
        load, largest, smallest, active = (
            float(np.mean(each)) for each in (self.loads, self.largest, self.smallest, self.active)
        )
        return ReplayMeans(load, largest, largest - smallest, active, len(self.loads))
