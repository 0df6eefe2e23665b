"""The split of choices on tensors; ``moesaic.brownout.split`` says what it decides.

On a CPU one call splits in place; on a GPU a few kernels do.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from moesaic.brownout import split
from moesaic.brownout.split import Instead, Level
from moesaic.native import library
from moesaic.native.structs import PromisesArgs

KEPT = Level(1.0)


@dataclass(frozen=True)
class Promises:
    """What rows may be promised, and what serves the choices whose experts do not stay.

    Attributes:
        levels: at most ``MAX_LEVELS``.
        way: experts of one group.
        instead: what serves them.
    """

    levels: tuple[Level, ...] = (KEPT,)
    way: int = 1
    instead: Instead = "united"

    @property
    def exact(self) -> bool:
        """True if every expert stays."""
        return all(level.threshold >= 1 for level in self.levels)

    @cached_property
    def _arrays(self) -> tuple[Any, Any]:
        thresholds = (ctypes.c_double * len(self.levels))(*(lv.threshold for lv in self.levels))
        phases = (ctypes.c_int32 * len(self.levels))(*(level.phase for level in self.levels))
        return thresholds, phases

    def on(self, level_of_row: Tensor | None) -> PromisesArgs:
        """The same, made to some rows, as C functions take it."""
        thresholds, phases = self._arrays
        return PromisesArgs(
            thresholds=ctypes.addressof(thresholds),
            phases=ctypes.addressof(phases),
            level_of_row=None if level_of_row is None else level_of_row.data_ptr(),
            num_levels=len(self.levels),
            way=self.way,
            instead=get_args(Instead).index(self.instead),
        )


class PromisedRows:
    """The rows of a batch with what they are promised, and how far that went: it counts over all layers."""

    def __init__(self, promises: Promises, level_of_row: Sequence[int]) -> None:
        """Promise each of ``T`` rows the level of that index."""
        self.promises = promises
        self.level_of_row = torch.tensor(level_of_row, dtype=torch.uint8)
        self.degraded = torch.zeros(len(level_of_row), dtype=torch.int32)
        self.c = promises.on(self.level_of_row)
        self._parts: list[tuple[Tensor, PromisedRows]] = []

    def only(self, rows: Sequence[int]) -> "PromisedRows":
        """Some of the rows, as they attend in the last layer; ``settle`` takes their counts."""
        index = torch.tensor(rows, dtype=torch.int64)
        part = PromisedRows(self.promises, self.level_of_row[index].tolist())
        self._parts.append((index, part))
        return part

    def settle(self) -> Tensor:
        """Count the choices of each row that its own experts did not serve, int32 ``[T]``."""
        for index, part in self._parts:
            self.degraded[index] += part.settle()
        self._parts.clear()
        return self.degraded


def split_choices(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, num_experts: int
) -> None:
    """Split choices in place, as ``moesaic.brownout.split.split_choices``, to the last bit.

    Args:
        topk_ids: int32 ``[T, k]``, contiguous, each in ``0..num_experts-1``, different in a row.
        topk_weights: float32 ``[T, k]``, contiguous.
        promised: the rows; counts what is degraded.
        num_experts: of the layer.
    """
    if library.library() is None:
        _in_numpy(topk_ids, topk_weights, promised, num_experts)
        return
    lib = library.lib()
    lib.split_choices(
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        count=len(topk_ids),
        top_k=topk_ids.shape[1],
        num_experts=num_experts,
        promises=promised.c,
        degraded=promised.degraded.data_ptr(),
        scratch=library.scratch(lib.split_choices_scratch(num_experts=num_experts)),
    )


def _in_numpy(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, num_experts: int
) -> None:
    promises = promised.promises
    choices = split.split_choices(
        topk_ids.numpy(),
        topk_weights.numpy(),
        list(promises.levels),
        promised.level_of_row.numpy(),
        num_experts,
        promises.way,
        promises.instead,
    )
    topk_ids.copy_(torch.from_numpy(choices.ids))
    topk_weights.copy_(torch.from_numpy(choices.weights))
    promised.degraded += torch.from_numpy(choices.degraded)
