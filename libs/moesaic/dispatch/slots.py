"""The experts resident in one process, by layer and slot, and their computation.

A ``SlotTable`` never changes: a new placement makes a new table that shares the layers that stay as
they were. So a step that is running keeps the experts it began with, whatever is being loaded or
retired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.kernels.grouped_experts import grouped_experts
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.experts import load_expert

if TYPE_CHECKING:
    from moesaic.kernels.grouped_experts_triton import SlotWeights


@dataclass(frozen=True)
class LayerSlots:
    """One layer's slots: ``experts[s]`` lies in ``gate_up[s]`` ``[2I, H]`` and ``down[s]`` ``[H,
    I]``."""

    experts: tuple[int, ...]
    gate_up: Tensor
    down: Tensor

    @cached_property
    def on_gpu(self) -> "SlotWeights":
        """The weights as a GPU's kernels find them."""
        from moesaic.kernels.grouped_experts_triton import SlotWeights

        pairs = zip(self.experts, self.gate_up, self.down, strict=True)
        return SlotWeights.of(
            [None if expert == EMPTY_SLOT else (gate_up, down) for expert, gate_up, down in pairs]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes


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
        mine: Tensor,
    ) -> Tensor:
        """The weighted sum over those of each row's experts that this process serves.

        Args:
            layer: index of the decoder layer.
            hidden_states: ``[T, H]``.
            topk_weights: float32 ``[T, k]``.
            topk_ids: int32 ``[T, k]``.
            mine: int64 ``[E]``: the slot to use for an expert, -1 where another process serves it.

        Returns:
            float32 ``[T, H]``.
        """
        slots = self.layers[layer]
        if hidden_states.is_cuda:
            return _compute_on_gpu(hidden_states, topk_weights, topk_ids, mine, slots)
        return grouped_experts(
            hidden_states, topk_weights, mine[topk_ids.long()], slots.gate_up, slots.down
        )

    def slot_of_expert(self, layer: int, num_experts: int, served: Sequence[bool]) -> Tensor:
        """int64 ``[E]``: the first slot that holds each expert marked in ``served``, -1
        elsewhere."""
        mine = torch.full((num_experts,), EMPTY_SLOT, dtype=torch.int64)
        for slot, expert in reversed(list(enumerate(self.layers[layer].experts))):
            if expert != EMPTY_SLOT and served[expert]:
                mine[expert] = slot
        return mine


def _compute_on_gpu(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, mine: Tensor, slots: LayerSlots
) -> Tensor:
    from moesaic.kernels import grouped_experts_triton

    if all(expert == EMPTY_SLOT for expert in slots.experts):
        return hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
    device = hidden_states.device  # weights and ids that another process chose arrive on the host
    slot_ids = mine[topk_ids.to(device).long()]
    return grouped_experts_triton.grouped_experts(
        hidden_states, topk_weights.to(device), slot_ids, slots.on_gpu
    )


@dataclass(frozen=True)
class LoadResult:
    """A new table, and how many replicas had to be read for it."""

    table: SlotTable
    loaded: int
    kept: int


def load_table(
    checkpoint: Checkpoint,
    config: ModelConfig,
    wanted: Mapping[int, Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    previous: SlotTable | None = None,
) -> LoadResult:
    """Make the table that holds ``wanted[layer][slot]``, reading only what ``previous`` lacks.

    Raises:
        CheckpointError: an expert's tensor is missing, damaged or mis-shaped; ``previous`` is
            untouched.
    """
    layers, loaded, kept = {}, 0, 0
    for layer, experts in wanted.items():
        old = previous.layers.get(layer) if previous else None
        present = sum(expert != EMPTY_SLOT for expert in experts)
        if old is not None and old.experts == tuple(experts):
            layers[layer] = old
            kept += present
            continue
        shape = (len(experts), 2 * config.moe.expert_size, config.hidden_size)
        gate_up = torch.zeros(shape, dtype=dtype, device=device)
        down = torch.zeros((shape[0], shape[2], shape[1] // 2), dtype=dtype, device=device)
        for slot, expert in enumerate(experts):
            if expert == EMPTY_SLOT:
                continue
            if old is not None and expert in old.experts:
                where = old.experts.index(expert)
                gate_up[slot], down[slot] = old.gate_up[where], old.down[where]
                kept += 1
                continue
            weights = load_expert(checkpoint, config, layer, expert, dtype, device)
            gate_up[slot], down[slot] = weights.gate_up, weights.down
            loaded += 1
        layers[layer] = LayerSlots(tuple(experts), gate_up, down)
    return LoadResult(SlotTable(layers), loaded, kept)
