# The split of choices: in place, before experts are assigned or computed.
#   Layout     choices [T, k] row by row; promises to rows by level.
#   Cost       T k counts and T k looks; sorts the experts that were chosen, for each phase.
#   Reference  moesaic.brownout.split, to the last bit.
"""The split of choices on tensors; ``moesaic.brownout.split`` says what it decides."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from moesaic.brownout import split
from moesaic.brownout.split import Level
from moesaic.messages.rung import Instead, Rung
from moesaic.native import library
from moesaic.native.structs import PromisesArgs, RungArgs


@dataclass(frozen=True, eq=False)
class LayerRung:
    """How the choices of one layer are degraded; see ``moesaic.brownout.split.Layer``.

    Attributes:
        num_experts: of the layer, without united ones.
        rung: the way to degrade.
        prices: int32 ``[num_experts]`` in 1..65535, on the CPU; None: 1 each.
        lost: bool ``[num_experts]``, on the CPU; None: none is.
    """

    num_experts: int
    rung: Rung = field(default_factory=Rung)
    prices: Tensor | None = None
    lost: Tensor | None = None

    @property
    def num_logical(self) -> int:
        """Number of experts that choices may name, united ones included."""
        return self.num_experts + self.rung.num_united(self.num_experts)

    @cached_property
    def layer(self) -> split.Layer:
        """The same for the reference."""
        return split.Layer(
            self.num_experts,
            self.rung,
            None if self.prices is None else self.prices.numpy().astype(np.uint16),
            None if self.lost is None else self.lost.numpy(),
        )

    @cached_property
    def c(self) -> RungArgs:
        """The same as C functions take it; it points into this object's memory."""
        prices, lost = self._numbers
        return RungArgs(
            num_experts=self.num_experts,
            way=self.rung.way,
            prices=None if prices is None else prices.ctypes.data,
            lost=None if lost is None else lost.ctypes.data,
            instead=get_args(Instead).index(self.rung.instead),
        )

    @cached_property
    def _numbers(self) -> tuple[Any, Any]:
        layer = self.layer
        return layer.prices, None if layer.lost is None else layer.lost.astype(np.uint8)


class PromisedRows:
    """The rows of a batch with what they are promised, and how far that went: it counts over all layers.

    Attributes:
        levels: at most ``MAX_LEVELS``.
        level_of_row: uint8 ``[T]``, on the CPU.
        degraded: int32 ``[T]``, on the device of the choices: those that were degraded so far.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        level_of_row: Sequence[int] | Tensor,
        device: torch.device | None = None,
    ) -> None:
        """Promise each of ``T`` rows the level of that index."""
        self.levels = tuple(levels)
        self.level_of_row = torch.as_tensor(level_of_row, dtype=torch.uint8)
        self.degraded = torch.zeros(len(self.level_of_row), dtype=torch.int32, device=device)
        self._parts: list[tuple[Tensor, PromisedRows]] = []

    def __len__(self) -> int:
        return len(self.level_of_row)

    @property
    def lowest(self) -> float:
        """The lowest threshold."""
        return min(level.threshold for level in self.levels)

    @cached_property
    def c(self) -> PromisesArgs:
        """The promises as C functions take them; they point into this object's memory."""
        thresholds, phases = self._arrays
        return PromisesArgs(
            thresholds=ctypes.addressof(thresholds),
            phases=ctypes.addressof(phases),
            level_of_row=self.level_of_row.data_ptr() if len(self.levels) > 1 else None,
            num_levels=len(self.levels),
        )

    @cached_property
    def _arrays(self) -> tuple[Any, Any]:
        whole = ctypes.c_int32 * len(self.levels)
        return whole(*(level.parts for level in self.levels)), whole(
            *(level.phase for level in self.levels)
        )

    def only(self, rows: Sequence[int] | Tensor) -> "PromisedRows":
        """Some of the rows, as they attend in the last layer; ``settle`` takes their counts."""
        index = torch.as_tensor(rows, dtype=torch.int64).cpu()
        part = PromisedRows(self.levels, self.level_of_row[index], self.degraded.device)
        self._parts.append((index, part))
        return part

    def note(self, degraded: Tensor) -> None:
        """Add the degraded choices of each row in one layer, any integers ``[T]``, which others have counted."""
        self.degraded += degraded.to(self.degraded)

    def settle(self) -> Tensor:
        """Count the choices of each row that its own experts did not serve, int32 ``[T]`` on the CPU."""
        for index, part in self._parts:
            self.degraded[index.to(self.degraded.device)] += part.degraded
        self._parts.clear()
        return self.degraded.cpu()


def split_choices(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, layer: LayerRung
) -> None:
    """Split choices in place, as ``moesaic.brownout.split.split_choices``, to the last bit.

    Args:
        topk_ids: int32 ``[T, k]``, contiguous, each in ``0..num_experts-1``, different in a row.
        topk_weights: float32 ``[T, k]``, contiguous, on the same device.
        promised: the rows; counts what is degraded.
        layer: the layer that they pass.
    """
    if topk_ids.is_cuda:
        from moesaic.kernels.triton import brownout as brownout_triton

        brownout_triton.split_choices(topk_ids, topk_weights, promised, layer)
        return
    assert len(topk_ids) == len(promised)
    assert topk_ids.dtype == torch.int32
    assert topk_ids.is_contiguous()
    assert topk_weights.is_contiguous()
    if library.library() is None:
        _in_numpy(topk_ids, topk_weights, promised, layer)
        return
    lib = library.lib()
    lib.split_choices(
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        count=len(topk_ids),
        top_k=topk_ids.shape[1],
        rung=layer.c,
        promises=promised.c,
        degraded=promised.degraded.data_ptr(),
        scratch=library.scratch(lib.split_choices_scratch(num_experts=layer.num_experts)),
    )


def _in_numpy(
    topk_ids: Tensor, topk_weights: Tensor, promised: PromisedRows, layer: LayerRung
) -> None:
    choices = split.split_choices(
        topk_ids.numpy(),
        topk_weights.numpy(),
        list(promised.levels),
        promised.level_of_row.numpy(),
        layer.layer,
    )
    topk_ids.copy_(torch.from_numpy(choices.ids))
    topk_weights.copy_(torch.from_numpy(choices.weights))
    promised.degraded += torch.from_numpy(choices.degraded)
