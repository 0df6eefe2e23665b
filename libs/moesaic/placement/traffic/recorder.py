"""Counts of the experts that gates choose, window by window. The caller holds the lock and the clock."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.messages.activation import (
    MAX_SAMPLED_BATCHES,
    MAX_SENT_PAIRS,
    ActivationWindow,
    LayerActivations,
)
from moesaic.placement.traffic.statistics import SAMPLED_ITEM, as_sampled

# Above it pairs are not counted: a table of them would pass a megabyte a layer.
MAX_PAIRED_EXPERTS = 512
MAX_WAITING_CHOICES = 8192  # of one layer; then they are counted at once


@dataclass
class _Layer:
    """One layer since the last window; ``waiting`` is not counted yet."""

    num_experts: int
    waiting: list[NDArray[Any]] = field(default_factory=list)
    num_waiting: int = 0
    rows: int = 0
    batches: int = 0
    pair_total: int = 0
    stride: int = 1  # every so many batches one is sampled
    sampled: list[NDArray[np.uint16]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = np.zeros(self.num_experts, np.int64)
        self.active_batches = np.zeros(self.num_experts, np.int64)
        paired = self.num_experts <= MAX_PAIRED_EXPERTS
        self.pairs = np.zeros(self.num_experts**2 if paired else 0, np.int32)  # [i * E + j], i < j

    def count(self) -> None:
        """Count the batches that wait. Ids outside ``0..E-1`` count for nothing."""
        waiting, self.waiting, self.num_waiting = self.waiting, [], 0
        for top_k in sorted({ids.shape[1] for ids in waiting}):
            self._count_alike([ids for ids in waiting if ids.shape[1] == top_k])

    def _count_alike(self, batches: list[NDArray[Any]]) -> None:
        num_experts = self.num_experts
        ids = np.sort(np.concatenate(batches).astype(np.int64), axis=1)  # [T, k]
        batch = np.repeat(np.arange(len(batches)), [len(b) for b in batches])  # [T]
        real = (ids >= 0) & (ids < num_experts)
        seen = (batch[:, None] * num_experts + ids)[real]
        per_batch = np.bincount(seen, minlength=len(batches) * num_experts)
        per_batch = per_batch.reshape(len(batches), num_experts)
        self.tokens += per_batch.sum(axis=0)
        self.active_batches += (per_batch > 0).sum(axis=0)
        self.rows += len(ids)
        chosen = real.sum(axis=1)
        self.pair_total += int((chosen * (chosen - 1) // 2).sum())
        if len(self.pairs):
            first, second = np.triu_indices(ids.shape[1], 1)
            # I < j, for rows are sorted.
            pairs = ids[:, first] * num_experts + ids[:, second]
            if not real.all():
                pairs = pairs[real[:, first] & real[:, second]]
            self.pairs += np.bincount(pairs.reshape(-1), minlength=len(self.pairs)).astype(np.int32)
        for rows in per_batch:
            self._sample(rows)

    def _sample(self, rows: NDArray[np.int64]) -> None:
        if self.batches % self.stride == 0:
            if len(self.sampled) == MAX_SAMPLED_BATCHES:
                self.sampled, self.stride = self.sampled[::2], 2 * self.stride
            if self.batches % self.stride == 0:
                self.sampled.append(as_sampled(rows))
        self.batches += 1

    def message(self, layer: int) -> LayerActivations:
        """The counts as a message, the most frequent pairs first, ties to the lower ids."""
        frequent = np.argsort(-self.pairs, kind="stable")[:MAX_SENT_PAIRS]
        frequent = frequent[self.pairs[frequent] > 0]
        return LayerActivations(
            layer=layer,
            rows=self.rows,
            batches=self.batches,
            tokens=self.tokens.tolist(),
            active_batches=self.active_batches.tolist(),
            pair_first=(frequent // self.num_experts).tolist(),
            pair_second=(frequent % self.num_experts).tolist(),
            pair_count=self.pairs[frequent].tolist(),
            pair_total=self.pair_total,
            sampled=[rows.astype(SAMPLED_ITEM).tobytes() for rows in self.sampled],
        )


class ActivationRecorder:
    """Counts the choices of every dispatch batch; one thread at a time may call it.

    Noting a batch copies its ids. They are counted when there are many, or at the end of the window.
    Memory is bounded by the ids that wait, 32 sampled batches, and a table of pairs for each layer. The
    table takes 4 bytes times E squared, at most a megabyte; there is none above 512 experts.
    """

    def __init__(self, num_experts: int) -> None:
        """``num_experts``: per layer, E.

        Raises:
            InvalidInput: it is not positive.
        """
        if num_experts < 1:
            raise InvalidInput("num_experts", f"must be at least 1, got {num_experts}")
        self._num_experts = num_experts
        self._layers: dict[int, _Layer] = {}

    def record(self, layer: int, topk_ids: NDArray[Any]) -> None:
        """Note one dispatch batch.

        Args:
            layer: the decoder layer.
            topk_ids: any integer ``[T, k]``, the experts of a row distinct. Copied. An id outside
                ``0..E-1`` counts for nothing.
        """
        # A copy, of any type.
        ids = topk_ids.astype(np.int32)
        if not ids.size:
            return
        counted = self._layers.get(layer)
        if counted is None:
            counted = self._layers[layer] = _Layer(self._num_experts)
        counted.waiting.append(ids)
        counted.num_waiting += ids.size
        if counted.num_waiting >= MAX_WAITING_CHOICES:
            counted.count()

    def take(self, window_s: float) -> "Taken":
        """Take the batches noted since the last call, and begin a new window.

        This is quick: the batches are counted later, by ``Taken.window``.

        Args:
            window_s: length of the window.
        """
        layers, self._layers = self._layers, {}
        return Taken(self._num_experts, layers, window_s)


@dataclass(frozen=True)
class Taken:
    """The batches that were noted during one window, some still to be counted."""

    num_experts: int
    layers: dict[int, _Layer]
    window_s: float

    def window(
        self, *, worker_id: str, generation: int, model_digest: str, epoch: int
    ) -> ActivationWindow:
        """Count the batches, and make a message of them. May be called once only."""
        for counted in self.layers.values():
            counted.count()
        return ActivationWindow(
            worker_id=worker_id,
            generation=generation,
            model_digest=model_digest,
            num_experts=self.num_experts,
            epoch=epoch,
            window_s=self.window_s,
            layers=[self.layers[layer].message(layer) for layer in sorted(self.layers)],
        )
