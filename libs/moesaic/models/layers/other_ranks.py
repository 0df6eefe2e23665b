"""The ranks after the first of an instance, as captured steps of the first one see them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.models.layers.kv_cache import KVCache


class StepsOfRanks(Protocol):
    """The other ranks' parts of the decode steps over one cache. They know the parts by the size of a step."""

    def capturing(self, size: int) -> AbstractContextManager[None]:
        """Compute and capture a step of ``size`` rows in the block; the others do the same with their parts."""
        ...

    def begin(self, facts: NDArray[np.int64], tables: NDArray[np.int32]) -> None:
        """Let the others compute their parts of a step; see ``StepTensors.put``."""
        ...

    def awaited(self) -> AbstractContextManager[None]:
        """Compute something in the block that the others wait for; if it fails, the instance is lost."""
        ...


class OtherRanks(Protocol):
    """The other ranks of an instance."""

    def prepare(
        self,
        cache: KVCache,
        max_rows: int,
        max_length: int,
        release: Callable[[], None],
        *,
        whole: bool,
    ) -> StepsOfRanks:
        """Let the others prepare for captured steps over ``cache``.

        Args:
            cache: the KV cache; the others have parts of it.
            max_rows: see ``DecodeShapes``.
            max_length: see ``DecodeShapes``.
            release: frees the graphs here; called before the ranks part.
            whole: true if a step is one graph; false if there is one up to the experts of each layer.

        Raises:
            UnusableSettings: another rank would compute steps of other shapes.
        """
        ...
