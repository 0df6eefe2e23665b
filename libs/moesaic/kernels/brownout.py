"""The split of choices on tensors; ``moesaic.brownout.split`` says what it decides.

On a CPU one call splits in place; on a GPU a few kernels do.
"""

import ctypes
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from moesaic.brownout import split
from moesaic.brownout.split import Instead, Level
from moesaic.native import library
from moesaic.native.structs import PromisesArgs


@dataclass(frozen=True, eq=False)
class Promises:
    """Promises to the rows of a batch, in every layer the same.

    Attributes:
        levels: at most ``MAX_LEVELS``.
        level_of_row: uint8 ``[T]``; None: all rows have the first level.
        way: experts of one group.
        instead: what serves the choices whose experts do not stay.
    """

    levels: tuple[Level, ...]
    level_of_row: Tensor | None
    way: int
    instead: Instead = "united"
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def exact(self) -> bool:
        """True if every expert stays."""
        return all(level.threshold >= 1 for level in self.levels)

    @cached_property
    def c(self) -> PromisesArgs:
        """The same as C functions take it."""
        thresholds = (ctypes.c_double * len(self.levels))(*(lv.threshold for lv in self.levels))
        phases = (ctypes.c_int32 * len(self.levels))(*(level.phase for level in self.levels))
        self._kept.update(thresholds=thresholds, phases=phases)
        return PromisesArgs(
            thresholds=ctypes.addressof(thresholds),
            phases=ctypes.addressof(phases),
            level_of_row=None if self.level_of_row is None else self.level_of_row.data_ptr(),
            num_levels=len(self.levels),
            way=self.way,
            instead=get_args(Instead).index(self.instead),
        )


def split_choices(
    topk_ids: Tensor, topk_weights: Tensor, promises: Promises, num_experts: int
) -> Tensor:
    """Split choices in place, as ``moesaic.brownout.split.split_choices``, to the last bit.

    Args:
        topk_ids: int32 ``[T, k]``, contiguous, each in ``0..num_experts-1``, different in a row.
        topk_weights: float32 ``[T, k]``, contiguous.
        promises: to the rows.
        num_experts: of the layer.

    Returns:
        int32 ``[T]``: choices of each row that its own experts do not serve.
    """
    if library.library() is None:
        return _in_numpy(topk_ids, topk_weights, promises, num_experts)
    lib, degraded = library.lib(), torch.empty(len(topk_ids), dtype=torch.int32)
    lib.split_choices(
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        count=len(topk_ids),
        top_k=topk_ids.shape[1],
        num_experts=num_experts,
        promises=promises.c,
        degraded=degraded.data_ptr(),
        scratch=library.scratch(lib.split_choices_scratch(num_experts=num_experts)),
    )
    return degraded


def _in_numpy(
    topk_ids: Tensor, topk_weights: Tensor, promises: Promises, num_experts: int
) -> Tensor:
    rows = promises.level_of_row
    choices = split.split_choices(
        topk_ids.numpy(),
        topk_weights.numpy(),
        list(promises.levels),
        (torch.zeros(len(topk_ids), dtype=torch.uint8) if rows is None else rows).numpy(),
        num_experts,
        promises.way,
        promises.instead,
    )
    topk_ids.copy_(torch.from_numpy(choices.ids))
    topk_weights.copy_(torch.from_numpy(choices.weights))
    return torch.from_numpy(choices.degraded)
