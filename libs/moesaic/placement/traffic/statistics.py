"""Statistics of the traffic, layer by layer, from which placements are made.

Counts are floats, weighted by age. ``decayed`` lowers all of them alike: ratios stay, and old traffic
fades.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
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

MAX_KEPT_SAMPLES = 256  # batches of one layer, the latest
MAX_EXPERTS = 4096
MAX_ROWS = 2**40  # of one layer in one window; nothing computes so many

Floats = NDArray[np.float64]
SAMPLED_ITEM = np.dtype("<u2")  # rows of one expert in one sampled batch, as they travel


@dataclass(frozen=True)
class LayerTraffic:
    """One layer."""

    tokens: Floats  # [E]: rows that chose the expert
    active_batches: Floats  # [E]: dispatch batches in which any row did
    coactivation: NDArray[np.float32]  # [E, E]: rows that chose both; symmetric, 0 on the diagonal
    rows: float
    batches: float
    sampled: NDArray[np.uint16]  # [B, E]: rows of each expert in some of the latest batches

    @classmethod
    def none(cls, num_experts: int) -> "LayerTraffic":
        """No traffic at all."""
        square = np.zeros((num_experts, num_experts), np.float32)
        nothing = np.zeros(num_experts)
        return cls(nothing, nothing, square, 0.0, 0.0, np.zeros((0, num_experts), np.uint16))

    @classmethod
    def of_batches(cls, batches: Iterable[NDArray[Any]], num_experts: int) -> "LayerTraffic":
        """Count some dispatch batches exactly (any integer ``[T, k]``, distinct in a row).

        Raises:
            InvalidInput: an id is not in ``0..E-1``.
        """
        square = np.zeros((num_experts, num_experts), np.float32)
        tokens = np.zeros(num_experts)
        sampled, rows = [], 0
        for topk_ids in batches:
            if topk_ids.size and not 0 <= topk_ids.min() <= topk_ids.max() < num_experts:
                raise InvalidInput("topk_ids", f"must be in 0..{num_experts - 1}")
            chosen = np.zeros((len(topk_ids), num_experts), np.float32)
            chosen[np.arange(len(topk_ids))[:, None], topk_ids] = 1
            square += chosen.T @ chosen
            tokens += chosen.sum(axis=0)
            sampled.append(chosen.sum(axis=0))
            rows += len(topk_ids)
        np.fill_diagonal(square, 0)
        counts = np.array(sampled).reshape(-1, num_experts)
        active = (counts > 0).sum(axis=0) * 1.0
        return cls(tokens, active, square, rows, len(counts), as_sampled(counts))

    def decayed(self, keep: float) -> "LayerTraffic":
        """Multiply all counts by ``keep``, in ``0..1``."""
        return LayerTraffic(
            self.tokens * keep,
            self.active_batches * keep,
            self.coactivation * np.float32(keep),
            self.rows * keep,
            self.batches * keep,
            self.sampled,
        )

    def plus(self, other: "LayerTraffic") -> "LayerTraffic":
        """Add ``other``'s counts. Its sampled batches are the latest; only so many of the latest are
        kept.
        """
        return LayerTraffic(
            self.tokens + other.tokens,
            self.active_batches + other.active_batches,
            self.coactivation + other.coactivation,
            self.rows + other.rows,
            self.batches + other.batches,
            np.concatenate([self.sampled, other.sampled])[-MAX_KEPT_SAMPLES:],
        )


@dataclass(frozen=True)
class Statistics:
    """All layers that had traffic, by decoder layer."""

    num_experts: int
    layers: Mapping[int, LayerTraffic]

    def decayed(self, keep: float) -> "Statistics":
        """Multiply all counts by ``keep``, which is ``0.5 ** (elapsed_s / half_life_s)``.

        Raises:
            InvalidInput: ``keep`` is not in ``0..1``.
        """
        if not 0 <= keep <= 1:
            raise InvalidInput("keep", f"must be in 0..1, got {keep}")
        return Statistics(self.num_experts, {n: t.decayed(keep) for n, t in self.layers.items()})

    def plus(self, window: ActivationWindow) -> "Statistics":
        """Add one window.

        Raises:
            InvalidInput: the window is inconsistent; see ``require_plausible``.
        """
        require_plausible(window, self.num_experts)
        layers = dict(self.layers)
        for seen in window.layers:
            before = layers.get(seen.layer) or LayerTraffic.none(self.num_experts)
            layers[seen.layer] = before.plus(_traffic_of(seen))
        return Statistics(self.num_experts, layers)

    def traffic(self, layers: Iterable[int]) -> tuple[LayerTraffic, ...]:
        """The traffic of each of ``layers``; none where nothing was seen."""
        nothing = LayerTraffic.none(self.num_experts)
        return tuple(self.layers.get(layer, nothing) for layer in layers)


def require_plausible(window: ActivationWindow, num_experts: int) -> None:
    """Refuse a window that no worker of this model can have seen.

    Raises:
        InvalidInput: naming the field. A list has another length than experts or samples have; a
            count is negative, not finite or larger than the count it is a part of; a layer stands twice.
    """
    if window.num_experts != num_experts or num_experts > MAX_EXPERTS:
        raise InvalidInput("num_experts", f"must be {num_experts}, got {window.num_experts}")
    if not (isfinite(window.window_s) and window.window_s >= 0):
        raise InvalidInput("window_s", f"must be finite and not negative, got {window.window_s}")
    if len({seen.layer for seen in window.layers}) < len(window.layers):
        raise InvalidInput("layers", "must be distinct")
    for seen in window.layers:
        _require_plausible_layer(seen, num_experts)


def _require_plausible_layer(seen: LayerActivations, num_experts: int) -> None:
    where = f"layers[{seen.layer}]"
    if not 0 <= seen.batches <= seen.rows <= MAX_ROWS:
        raise InvalidInput(f"{where}.rows", f"must be in batches..{MAX_ROWS}, got {seen.rows}")
    for name, counts, most in (
        ("tokens", seen.tokens, seen.rows),
        ("active_batches", seen.active_batches, seen.batches),
    ):
        if len(counts) != num_experts or not all(0 <= count <= most for count in counts):
            raise InvalidInput(f"{where}.{name}", f"must be {num_experts} counts up to {most}")
    pairs = list(zip(seen.pair_first, seen.pair_second, strict=False))
    lengths = {len(seen.pair_first), len(seen.pair_second), len(seen.pair_count)}
    if lengths != {len(pairs)} or len(pairs) > MAX_SENT_PAIRS or len(set(pairs)) < len(pairs):
        raise InvalidInput(f"{where}.pairs", f"must be up to {MAX_SENT_PAIRS} distinct ones")
    if not all(0 <= i < j < num_experts for i, j in pairs):
        raise InvalidInput(f"{where}.pairs", f"must be ascending, of experts below {num_experts}")
    if not all(
        0 <= count <= min(seen.tokens[i], seen.tokens[j])
        for (i, j), count in zip(pairs, seen.pair_count, strict=True)
    ):
        raise InvalidInput(f"{where}.pair_count", "must not exceed the counts of the two experts")
    if not sum(seen.pair_count) <= seen.pair_total <= seen.rows * num_experts**2:
        raise InvalidInput(f"{where}.pair_total", "must be at least what was sent")
    size = SAMPLED_ITEM.itemsize * num_experts
    if len(seen.sampled) > min(MAX_SAMPLED_BATCHES, seen.batches) or any(
        len(rows) != size for rows in seen.sampled
    ):
        raise InvalidInput(
            f"{where}.sampled", f"must be up to {MAX_SAMPLED_BATCHES} of {size} bytes"
        )
    if _sampled_of(seen, num_experts).max(initial=0) > seen.rows:
        raise InvalidInput(f"{where}.sampled", f"must have up to {seen.rows} rows of an expert")


def _sampled_of(seen: LayerActivations, num_experts: int) -> NDArray[np.uint16]:
    rows = np.frombuffer(b"".join(seen.sampled), SAMPLED_ITEM)
    return rows.reshape(-1, num_experts).astype(np.uint16)


def as_sampled(counts: NDArray[Any]) -> NDArray[np.uint16]:
    """Rows of experts as samples keep them, 65,535 at most."""
    sampled: NDArray[np.uint16] = np.minimum(counts, np.iinfo(np.uint16).max).astype(np.uint16)
    return sampled


def _traffic_of(seen: LayerActivations) -> LayerTraffic:
    num_experts = len(seen.tokens)
    tokens = np.array(seen.tokens, np.float64)
    known = np.zeros((num_experts, num_experts), bool)
    square = np.zeros((num_experts, num_experts), np.float32)
    known[seen.pair_first, seen.pair_second] = True
    square[seen.pair_first, seen.pair_second] = seen.pair_count
    # Of pairs that were not sent only the sum is known. It is spread over them as if their experts
    # were chosen independently of each other.
    if rest := seen.pair_total - sum(seen.pair_count):
        likely = np.triu(np.outer(tokens, tokens), 1) * ~known
        if (total := likely.sum()) > 0:
            square += (likely * (rest / total)).astype(np.float32)
    return LayerTraffic(
        tokens,
        np.array(seen.active_batches, np.float64),
        square + square.T,
        float(seen.rows),
        float(seen.batches),
        _sampled_of(seen, num_experts),
    )
