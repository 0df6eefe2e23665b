"""Read one routed expert's weights, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.stored_weights import StoredWeight, dequantised
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats import mxfp4
from moesaic.models.weights.formats.names import fused_names
from moesaic.models.weights.formats.reading import joined, read_matrix, settled
from moesaic.models.weights.tensor_names import expert_names, moe_prefix


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
    size, hidden, num = config.moe.expert_size, config.hidden_size, config.moe.num_experts
    prefix = moe_prefix(checkpoint, layer) + "experts."
    if prefix + "gate_up_proj" in checkpoint:  # all experts of the layer in two tensors
        return ExpertWeights(
            checkpoint.read_slice(
                prefix + "gate_up_proj", expert, (num, 2 * size, hidden), dtype, device
            ),
            checkpoint.read_slice(prefix + "down_proj", expert, (num, hidden, size), dtype, device),
        )
    if fused_names(config.weight_format, prefix + "gate_up_proj", checkpoint):
        gate_up_down = (
            mxfp4.read_expert(checkpoint, prefix + name, expert, num, *shape)
            for name, shape in (
                ("gate_up_proj", (2 * size, hidden)),
                ("down_proj", (hidden, size)),
            )
        )
        return ExpertWeights(*(settled(weight, dtype, device) for weight in gate_up_down))
    prefix += f"{expert}."
    gate, up, down = (
        read_matrix(checkpoint, config.weight_format, prefix + name, shape, dtype, device)
        for name, shape in zip(
            expert_names(checkpoint, prefix),
            ((size, hidden), (size, hidden), (hidden, size)),
            strict=True,
        )
    )
    return ExpertWeights(joined((gate, up), dtype), down)
