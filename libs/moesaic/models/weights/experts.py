"""Read one routed expert's weights, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.stored_weights import StoredWeight, dequantised
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.reading import joined, read_entry, read_matrix
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: ``down(silu(gate(x)) * up(x))``."""

    gate_up: StoredWeight  # [2I, H]: gate, then up
    down: StoredWeight  # [H, I]

    def numbers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what both stand for."""
        return dequantised(self.gate_up, dtype), dequantised(self.down, dtype)


def load_expert(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    expert: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertWeights:
    """Read routed expert ``expert`` of decoder layer ``layer``, from files of any naming.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or cannot be read.
    """
    assert layer in config.moe_layers
    assert 0 <= expert < config.moe.num_experts
    size, hidden = config.moe.expert_size, config.hidden_size
    prefix, weight_format = layer_prefix(layer), config.weight_format
    names = [prefix + name for name in sparse_names(config, checkpoint, layer).experts]
    if len(names) == 2:  # all experts of the layer in two tensors
        num = config.moe.num_experts
        both = (
            read_entry(checkpoint, weight_format, name, expert, (num, *shape), dtype, device)
            for name, shape in zip(names, ((2 * size, hidden), (hidden, size)), strict=True)
        )
        return ExpertWeights(*both)
    shapes = (size, hidden), (size, hidden), (hidden, size)
    gate, up, down = (
        read_matrix(checkpoint, weight_format, name.format(expert), shape, dtype, device)
        for name, shape in zip(names, shapes, strict=True)
    )
    return ExpertWeights(joined((gate, up), dtype), down)
