"""Experts that are read from files when rows want them, and those kept in memory that are wanted most.

An expert that was read stays if there is room, or if it is wanted more than the one of all here that is
wanted least. So one long prompt does not wash out what is needed every minute, as with the least recently used
it would. Wants are counted of all rows of this site, also of those that others compute, and halved now and then.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moesaic.experts.loaded import Bring, LoadedExpert

HALVE_AFTER = 64  # choices of each expert, in the mean over all
LOAD_WEIGHS = 0.2  # in the mean time of loads

Key = tuple[int, int]  # decoder layer, weights id


class FileCache:
    """The experts in files of one process; lives on one event loop.

    Attributes:
        capacity: experts that may be kept.
        load_s: mean time of one load; 0 until there was one.
    """

    def __init__(
        self,
        bring: Bring,
        layers: Sequence[int],
        num_experts: int,
        capacity: int,
    ) -> None:
        """Keep nothing yet.

        Args:
            bring: reads one expert, on a thread of its own.
            layers: decoder layers with experts.
            num_experts: of each.
            capacity: experts that may be kept.
        """
        self.capacity, self.load_s = capacity, 0.0
        self._bring = bring
        self._row_of = {layer: idx for idx, layer in enumerate(layers)}
        self._wanted: NDArray[np.float64] = np.zeros((len(layers), num_experts))
        self._since_halved = 0
        self._held: dict[Key, LoadedExpert] = {}
        self._reader = ThreadPoolExecutor(1, "files")

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    @property
    def num_held(self) -> int:
        """Experts in memory."""
        return len(self._held)

    def note(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Count choices of a layer's own experts, int32 of any shape; others count for nothing."""
        counts = self._wanted[self._row_of[layer]]
        own = ids[(ids >= 0) & (ids < len(counts))]
        counts += np.bincount(own, minlength=len(counts))
        self._since_halved += own.size
        if self._since_halved > HALVE_AFTER * self._wanted.size:
            self._wanted /= 2
            self._since_halved = 0

    async def get(self, layer: int, experts: Sequence[int]) -> list[LoadedExpert]:
        """Have some experts of a layer, by weights id; those that are missing are read.

        Experts that are not cached live as long as the caller holds them.

        Raises:
            CheckpointError: one cannot be read.
        """
        missing = [expert for expert in experts if (layer, expert) not in self._held]
        found = {e: self._held[layer, e] for e in experts if (layer, e) in self._held}
        if missing:
            started = time.monotonic()
            reading = partial(_read, self._bring, layer, missing)
            read = await asyncio.get_running_loop().run_in_executor(self._reader, reading)
            each_s = (time.monotonic() - started) / len(missing)
            self.load_s += (LOAD_WEIGHS if self.load_s else 1.0) * (each_s - self.load_s)
            for expert, loaded in zip(missing, read, strict=True):
                found[expert] = loaded
                self._admit((layer, expert), loaded)
        return [found[expert] for expert in experts]

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget experts, such as those that have a slot now."""
        for key in keys:
            self._held.pop(key, None)

    def resize(self, capacity: int) -> None:
        """Keep at most this number of experts from now on, the most wanted."""
        self.capacity = capacity
        while len(self._held) > capacity:
            del self._held[self._least()]

    def _admit(self, key: Key, loaded: LoadedExpert) -> None:
        if len(self._held) >= self.capacity:
            least = self._least() if self._held else None
            if least is None or self._worth(key) <= self._worth(least):
                return
            del self._held[least]
        self._held[key] = loaded

    def _least(self) -> Key:
        return min(self._held, key=lambda key: (self._worth(key), key))

    def _worth(self, key: Key) -> float:
        """Wants of an expert; a united one serves many rows whenever it is wanted at all."""
        layer, expert = key
        counts = self._wanted[self._row_of[layer]]
        return float(counts[expert]) if expert < len(counts) else float(counts.max())


def _read(bring: Bring, layer: int, experts: Sequence[int]) -> list[LoadedExpert]:
    return [bring(layer, expert) for expert in experts]
