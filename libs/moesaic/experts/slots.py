"""The experts resident in one process, by layer and slot, and their computation; named by weights ids.

A ``SlotTable`` never changes: a new placement makes a new table, which shares unchanged layers. So a
running step keeps the experts that it began with, while others are loaded or retired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.experts.loaded import ExpertFiles, LoadedExpert
from moesaic.experts.pace import LoadPace
from moesaic.kernels.gated_mlp import CodedMLP, GatedMLP, PlainMLP
from moesaic.kernels.grouped_experts import grouped_experts
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.packed_experts import PackedMLP, PackedSlots
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.on_threads import on_threads

if TYPE_CHECKING:
    from moesaic.kernels.triton.grouped_products import SlotWeights

ExpertKey = tuple[int, int]  # decoder layer, weights id


@dataclass(frozen=True)
class LayerSlots:
    """One layer's slots: ``mlps[s]`` computes expert ``experts[s]``."""

    experts: tuple[int, ...]
    mlps: tuple[GatedMLP | None, ...]  # None: an empty slot
    loaded: tuple[LoadedExpert | None, ...] = ()  # the same experts, where peers may pull them

    @classmethod
    def of(cls, experts: Sequence[int], loaded: Sequence[LoadedExpert | None]) -> "LayerSlots":
        """Slots with experts as they were loaded."""
        mlps = tuple(expert.mlp if expert else None for expert in loaded)
        return cls(tuple(experts), mlps, tuple(loaded))

    @cached_property
    def on_gpu(self) -> "SlotWeights":
        """The weights as a GPU's kernels find them."""
        from moesaic.kernels.triton.grouped_products import SlotWeights

        mlps = [mlp if isinstance(mlp, PlainMLP | CodedMLP) else None for mlp in self.mlps]
        return SlotWeights.of(mlps)

    @cached_property
    def packed(self) -> PackedSlots | None:
        """The weights as a CPU's kernel finds them; ``None``: no slot has packed ones."""
        packed = [mlp if isinstance(mlp, PackedMLP) else None for mlp in self.mlps]
        return PackedSlots(packed) if any(packed) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(mlp.nbytes for mlp in self.mlps if mlp is not None)


@dataclass(frozen=True)
class SlotTable:
    """All slots of one process under one placement."""

    layers: Mapping[int, LayerSlots]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in the slots."""
        return sum(layer.nbytes for layer in self.layers.values())

    def compute(
        self,
        layer: int,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        mine: Tensor | None,
    ) -> Tensor:
        """The weighted sum over those of each row's experts that this process serves.

        Args:
            layer: index of the decoder layer.
            hidden_states: ``[T, H]``.
            topk_weights: float32 ``[T, k]``.
            topk_ids: int32 ``[T, k]``.
            mine: int64 ``[E]``: the slot to use for an expert, -1 where another process serves it;
                ``None`` where expert ``e`` lies in slot ``e``.

        Returns:
            float32 ``[T, H]``.
        """
        slot_ids = topk_ids.to(hidden_states.device)
        if mine is not None:
            slot_ids = mine.index_select(0, slot_ids.flatten()).view(topk_ids.shape)
        return self.compute_slots(layer, hidden_states, topk_weights, slot_ids)

    def compute_slots(
        self, layer: int, hidden_states: Tensor, topk_weights: Tensor, slot_ids: Tensor
    ) -> Tensor:
        """Compute as ``compute`` does, given the slot of each choice.

        Args:
            layer: index of the decoder layer.
            hidden_states: ``[T, H]``.
            topk_weights: float32 ``[T, k]``.
            slot_ids: int32 or int64 ``[T, k]``, -1 where another process serves the choice.

        Returns:
            float32 ``[T, H]``.
        """
        slots = self.layers[layer]
        if hidden_states.is_cuda:
            return compute_on_gpu(hidden_states, topk_weights, slot_ids, slots)
        if slots.packed is not None:
            return slots.packed.compute(hidden_states, topk_weights, slot_ids.to(torch.int32))
        return grouped_experts(hidden_states, topk_weights, slot_ids, slots.mlps)

    def compute_choices(
        self, layer: int, hidden_states: Tensor, slot_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The unweighted result of each choice that this process serves.

        Args:
            layer: index of the decoder layer.
            hidden_states: ``[T, H]``.
            slot_ids: int32 or int64 ``[T, k]``, -1 where another process serves the choice.

        Returns:
            Results float32 ``[n, H]``; their places int64 ``[n, 1]`` among the ``T * k`` choices,
            row by row.
        """
        top_k, slots = slot_ids.shape[1], slot_ids.flatten()
        places = (slots >= 0).nonzero()  # [n, 1]
        if not len(places):
            return hidden_states.new_empty(0, hidden_states.shape[1], dtype=torch.float32), places
        rows = hidden_states.index_select(0, places[:, 0] // top_k)
        ones = torch.ones(len(places), 1, device=rows.device)
        return self.compute_slots(layer, rows, ones, slots[places]), places

    def slot_of_expert(self, layer: int, num_experts: int, served: Sequence[bool]) -> Tensor:
        """The first slot that holds each expert marked in ``served``.

        Returns:
            int64 ``[E]``, -1 for other experts.
        """
        mine = torch.full((num_experts,), EMPTY_SLOT, dtype=torch.int64)
        for slot, expert in reversed(list(enumerate(self.layers[layer].experts))):
            if expert != EMPTY_SLOT and served[expert]:
                mine[expert] = slot
        return mine


def compute_on_gpu(
    hidden_states: Tensor, topk_weights: Tensor, slot_ids: Tensor, slots: LayerSlots
) -> Tensor:
    """Compute the weighted sums of a layer's experts as ``SlotTable.compute_slots`` does, with Triton's kernels."""
    from moesaic.kernels.triton import grouped_experts as grouped_experts_triton

    if all(mlp is None for mlp in slots.mlps):
        return hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
    return grouped_experts_triton.grouped_experts(
        hidden_states, topk_weights, slot_ids.long(), slots.on_gpu
    )


@dataclass(frozen=True)
class LoadResult:
    """A new table, and the numbers of replicas that were loaded for it and kept."""

    table: SlotTable
    loaded: int
    kept: int


def load_table(
    checkpoint: Checkpoint,
    config: ModelConfig,
    wanted: Mapping[int, Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
) -> LoadResult:
    """Make the table that holds ``wanted[layer][slot]``, read from files.

    Raises:
        CheckpointError: an expert's tensor is missing, damaged or mis-shaped.
    """

    files = ExpertFiles(checkpoint, config, dtype, device, quantization, for_peers=False)
    missing, bring = missing_experts(wanted, ()), files.bring(LoadPace())
    with files.progress.expecting(sum(files.experts.stored_bytes(*key) for key in missing)):
        loaded = on_threads(lambda key: bring(*key), missing)
    return change_table(wanted, dict(zip(missing, loaded, strict=True)), ())


def held_experts(tables: Sequence[SlotTable]) -> dict[ExpertKey, LoadedExpert]:
    """Collect the experts of tables; of one that several have, that of the first."""
    return {
        (layer, expert): loaded
        for table in reversed(tables)
        for layer, slots in table.layers.items()
        for expert, loaded in zip(slots.experts, slots.loaded, strict=True)
        if loaded is not None
    }


def missing_experts(
    wanted: Mapping[int, Sequence[int]], resident: Sequence[SlotTable]
) -> list[ExpertKey]:
    """List the experts, each once, that are wanted and in no table."""
    held = held_experts(resident)
    asked = {(at, e): None for at, experts in wanted.items() for e in sorted(experts)}
    return [key for key in asked if key[1] != EMPTY_SLOT and key not in held]


def change_table(
    wanted: Mapping[int, Sequence[int]],
    brought: Mapping[ExpertKey, LoadedExpert],
    resident: Sequence[SlotTable],
) -> LoadResult:
    """Make the table that holds ``wanted[layer][slot]``.

    Args:
        wanted: expert ids by layer and slot; -1 is an empty slot.
        brought: experts that no table has.
        resident: tables in memory, the one in force first. Their experts are shared, not copied.
    """
    held = {**held_experts(resident), **brought}
    layers, kept = {}, 0
    for layer, experts in wanted.items():
        olds = [table.layers[layer] for table in resident if layer in table.layers]
        kept += sum(e != EMPTY_SLOT and (layer, e) not in brought for e in experts)
        same = next((old for old in olds if old.experts == tuple(experts)), None)
        slots = [held[layer, e] if e != EMPTY_SLOT else None for e in experts]
        layers[layer] = same or LayerSlots.of(experts, slots)
    return LoadResult(SlotTable(layers), len(brought), kept)
