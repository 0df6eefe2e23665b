"""Activated experts to be expected on the fullest instance, by number of instances, slots and rows of a batch.

A layer that memory bounds takes as long as the instance with most activated experts. How many these are depends on
routing, replicas, their places and the choice among them; so batches of recorded or drawn routing are scheduled, and
the counts are remembered.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.placement.policies.janus import janus
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.schedule.aebs import replica_table, schedule_rows
from moesaic.placement.traffic.statistics import LayerTraffic

ReplicaChoice = Literal["aebs", "random", "single"]
"""``aebs``: replicas of popular experts, chosen by AEBS. ``random``: the same replicas, one drawn for each expert and
batch. ``single``: each expert is in one place."""

STEP = 1.2  # ratio of instances between which counts are interpolated
BATCHES = 4  # of each layer and size
Keep = Callable[
    [NDArray[Any]], NDArray[Any]
]  # choices of a batch to those that their own experts serve


class ActivatedExperts:
    """Expected counts for one model's routing; they are found when they are first asked for."""

    def __init__(
        self,
        layers: Sequence[NDArray[Any]],
        num_experts: int,
        choice: ReplicaChoice = "aebs",
        seed: int = 0,
        keep: Keep | None = None,
    ) -> None:
        """Take routing: the first half of each layer's rows is placed by, batches are drawn of the second.

        Args:
            layers: of each layer the experts of its rows, int ``[rows, k]``.
            num_experts: of each layer.
            choice: the way in which replicas are made and chosen.
            seed: of batches and random choices.
            keep: takes ``[T, k]`` and puts -1 where brownout degrades a choice; None: degrades none.

        Raises:
            InvalidInput: there are too few rows, or no such choice.
        """
        if choice not in get_args(ReplicaChoice):
            raise InvalidInput("choice", f"must be one of {', '.join(get_args(ReplicaChoice))}")
        if not layers or min(map(len, layers)) < 4:
            raise InvalidInput("layers", "must hold at least four rows each")
        self._layers, self._num_experts = layers, num_experts
        self._choice, self._seed, self._keep = choice, seed, keep
        self._most = min(len(rows) - len(rows) // 2 for rows in layers)  # rows of a batch
        self._counted = lru_cache(maxsize=None)(self._count)
        self._placed = lru_cache(maxsize=None)(self._place)
        self._batches = lru_cache(maxsize=None)(self._draw)

    def largest(self, instances: int, slots: int, rows: float) -> float:
        """Estimate the mean largest number of activated experts on an instance.

        Counts lie on straight lines between the powers of 2 of ``rows``, and between some numbers of instances. Of more
        rows than half of a layer's, that half is scheduled.

        Args:
            instances: that have the experts.
            slots: of each instance for one layer.
            rows: of a batch.

        Raises:
            InvalidInput: the slots cannot hold every expert.
        """
        if instances * slots < self._num_experts:
            raise InvalidInput(
                "slots",
                f"must hold {self._num_experts} experts, {instances} x {slots} are too few",
            )
        if rows <= 0:
            return 0.0
        slots = min(slots, self._num_experts)
        if self._choice == "single":
            return self._at(instances, slots, rows)
        below, above = self._neighbours(instances, slots)
        if below == above:
            return self._at(below, slots, rows)
        part = (1 / below - 1 / instances) / (1 / below - 1 / above)
        return (1 - part) * self._at(below, slots, rows) + part * self._at(above, slots, rows)

    def _neighbours(self, instances: int, slots: int) -> tuple[int, int]:
        """Find the numbers of instances that are counted, on both sides."""
        below = above = -(-self._num_experts // slots)
        while above < instances:
            below, above = above, max(above + 1, round(above * STEP))
        return (above, above) if above == instances else (below, above)

    def _at(self, instances: int, slots: int, rows: float) -> float:
        rows = min(max(rows, 1.0), float(self._most))
        low = 1 << (int(rows).bit_length() - 1)
        high = min(2 * low, self._most)
        of_low = self._counted(instances, slots, low)
        if high <= low or rows == low:
            return of_low
        part = (rows - low) / (high - low)
        return (1 - part) * of_low + part * self._counted(instances, slots, high)

    def _count(self, instances: int, slots: int, rows: int) -> float:
        random = np.random.default_rng((self._seed, instances, slots, rows))
        placed = self._placed(instances, slots)
        counts = [
            self._largest_of(tokens, replicas, random)
            for replicas, batches in zip(placed, self._batches(rows), strict=True)
            for tokens in batches
        ]
        return float(np.mean(counts))

    def _largest_of(
        self, tokens: NDArray[np.int64], replicas: NDArray[np.int32], random: np.random.Generator
    ) -> int:
        if self._choice == "aebs":
            return int(schedule_rows(tokens, replicas)[1].max())
        # Of one replica there is nothing to draw.
        drawn = np.where(replicas >= 0, random.random(replicas.shape), -1.0).argmax(axis=1)
        return int(np.bincount(drawn[tokens > 0], minlength=1).max())

    def _place(self, instances: int, slots: int) -> list[NDArray[np.int32]]:
        if self._choice == "single":
            own = [each.tolist() for each in np.array_split(range(self._num_experts), instances)]
            return [replica_table(own, self._num_experts)] * len(self._layers)
        traffic = tuple(
            LayerTraffic.of_batches(np.array_split(rows[: len(rows) // 2], 16), self._num_experts)
            for rows in self._layers
        )
        placed = janus(PlacementProblem(traffic=traffic, slots=(slots,) * instances))
        return [replica_table(layer, self._num_experts) for layer in placed]

    def _draw(self, rows: int) -> list[list[NDArray[np.int64]]]:
        """Draw the batches of one size: of each layer, the rows of each expert."""
        random = np.random.default_rng((self._seed, rows))
        return [
            [
                self._tokens(layer[len(layer) // 2 :], rows, random)
                for _ in range(1 if rows == self._most else BATCHES)
            ]
            for layer in self._layers
        ]

    def _tokens(
        self, layer: NDArray[Any], rows: int, random: np.random.Generator
    ) -> NDArray[np.int64]:
        chosen = layer[random.choice(len(layer), rows, replace=False)]
        ids = (chosen if self._keep is None else self._keep(chosen)).ravel()
        return np.bincount(ids[ids >= 0], minlength=self._num_experts)
