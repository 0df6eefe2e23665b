"""Promises to the rows of a batch, and how a layer is degraded, as kernels take them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.brownout import split
from moesaic.brownout.split import Level
from moesaic.messages.substitution import Instead, Substitution
from moesaic.native.structs import PromisesArgs, SubstitutionArgs


@dataclass(frozen=True, eq=False)
class LayerSubstitution:
    """The way in which the choices of one layer are degraded; see ``moesaic.brownout.split.Layer``.

    Attributes:
        num_experts: experts of the layer, without united ones.
        substitution: the way to degrade.
        lost: bool ``[num_experts]``, on the CPU; None: none is.
        homes: int32 ``[num_experts]``, each in ``0..num_experts-1``, on the CPU: the instance that has each
            expert; None: all are in one place.
    """

    num_experts: int
    substitution: Substitution = field(default_factory=Substitution)
    lost: Tensor | None = None
    homes: Tensor | None = None

    @cached_property
    def layer(self) -> split.Layer:
        """The same for the reference."""
        return split.Layer(
            self.num_experts,
            self.substitution,
            None if self.lost is None else self.lost.numpy(),
            None if self.homes is None else self.homes.numpy(),
        )

    @cached_property
    def c(self) -> SubstitutionArgs:
        """The same as C functions take it; it points into this object's memory."""
        lost = self._lost
        return SubstitutionArgs(
            num_experts=self.num_experts,
            way=self.substitution.way,
            lost=None if lost is None else lost.ctypes.data,
            homes=None if self.homes is None else self.homes.data_ptr(),
            instead=get_args(Instead).index(self.substitution.instead),
        )

    @cached_property
    def _lost(self) -> NDArray[np.uint8] | None:
        return None if self.lost is None else self.lost.numpy().astype(np.uint8)


class LevelTables(NamedTuple):
    """Promises as a GPU's kernels take them.

    Attributes:
        by_phase: int32 ``[2 + 3 * most]``: the number of phases; by phase the levels' indices, then their
            thresholds in parts; then where each phase begins, and the end.
        level_of_row: uint8 ``[T]``; ``most`` for a row that counts nowhere.
        most: levels that there may be.
    """

    by_phase: Tensor
    level_of_row: Tensor
    most: int


class PromisedRows:
    """The rows of a batch with what they are promised, and how far that went, layer by layer.

    Attributes:
        levels: promises, at most ``MAX_LEVELS``.
        level_of_row: uint8 ``[T]``, on the CPU.
        degraded: int32 ``[num_layers, T]``, on the device of the choices: those that were degraded so far.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        level_of_row: Sequence[int] | Tensor,
        device: torch.device | None = None,
        num_layers: int = 1,
    ) -> None:
        """Promise each of ``T`` rows the level of that index, in layers that are counted apart."""
        self.levels = tuple(levels)
        self.level_of_row = torch.as_tensor(level_of_row, dtype=torch.uint8)
        shape = num_layers, len(self.level_of_row)
        self.degraded = torch.zeros(shape, dtype=torch.int32, device=device)
        self._layer = 0
        self._tables: LevelTables | None = None
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

    def tables(self) -> LevelTables:
        """Return the promises on the device of ``degraded``; all layers share them."""
        if self._tables is None:
            by_phase, device = _by_phase(self.levels, len(self.levels)), self.degraded.device
            tables = on_device(by_phase, device), on_device(self.level_of_row, device)
            self._tables = LevelTables(*tables, len(self.levels))
        return self._tables

    def enter(self, layer: int) -> "PromisedRows":
        """Count in this layer from now on."""
        self._layer = layer
        return self

    @property
    def counts(self) -> Tensor:
        """Degraded choices of each row in the layer that rows are in, int32 ``[T]``: add to it."""
        return self.degraded[self._layer]

    def only(self, rows: Sequence[int] | Tensor) -> "PromisedRows":
        """Some of the rows, as they attend in the last layer; ``settle`` takes their counts."""
        index = torch.as_tensor(rows, dtype=torch.int64).cpu()
        part = PromisedRows(
            self.levels, self.level_of_row[index], self.degraded.device, len(self.degraded)
        )
        self._parts.append((index, part))
        return part

    def note(self, degraded: Tensor) -> None:
        """Add the degraded choices of each row, any integers ``[T]``, which others have counted."""
        self.counts.add_(degraded.to(self.degraded))

    def settle(self) -> Tensor:
        """Count the choices that rows' own experts did not serve, int32 ``[num_layers, T]`` on the CPU."""
        for index, part in self._parts:
            self.degraded[:, index.to(self.degraded.device)] += part.degraded
        self._parts.clear()
        return self.degraded.cpu()


class StaticPromises(PromisedRows):
    """Promises to a fixed number of rows, in tensors that stay: a captured step reads them there."""

    MOST_LEVELS = 16

    def __init__(self, num_rows: int, device: torch.device, num_layers: int) -> None:
        """Promise nothing to ``num_rows`` rows on ``device``."""
        super().__init__((), torch.zeros(num_rows, dtype=torch.uint8), device, num_layers)
        nothing = _by_phase((), self.MOST_LEVELS).to(device)
        self._tables = LevelTables(
            nothing, self.level_of_row.to(device) + self.MOST_LEVELS, self.MOST_LEVELS
        )

    @classmethod
    def takes(cls, promised: PromisedRows) -> bool:
        """Return true if promises to rows have few enough levels."""
        return len(promised.levels) <= cls.MOST_LEVELS

    def fill(self, promised: PromisedRows) -> None:
        """Take promises that ``takes`` accepts; the rows behind them count nowhere."""
        by_phase, level_of_row, _ = self.tables()
        by_phase.copy_(_by_phase(promised.levels, self.MOST_LEVELS))
        levels = torch.full((len(self),), self.MOST_LEVELS, dtype=torch.uint8)
        levels[: len(promised)] = promised.level_of_row
        level_of_row.copy_(levels)

    def settle_in(self, promised: PromisedRows) -> None:
        """Hand over the degraded choices of the rows that were filled in."""
        promised.degraded.copy_(self.degraded[:, : len(promised)])


def _by_phase(levels: Sequence[Level], most: int) -> Tensor:
    """Lay out up to ``most`` levels as ``LevelTables`` says."""
    order = sorted(range(len(levels)), key=lambda index: levels[index].phase)
    sizes = [len(list(same)) for _, same in groupby(levels[index].phase for index in order)]
    table = torch.zeros(2 + 3 * most, dtype=torch.int32)
    table[0] = len(sizes)
    table[1 : 1 + len(order)] = torch.tensor(order)
    table[1 + most : 1 + most + len(order)] = torch.tensor([levels[i].parts for i in order])
    table[1 + 2 * most : 2 + 2 * most + len(sizes)] = torch.tensor([0, *accumulate(sizes)])
    return table


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a small table to ``device`` without waiting for it."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
