"""Read one routed expert's weights, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.tensor_names import MIXTRAL_NAMES, USUAL_NAMES, moe_prefix


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: ``down(activation(gate(x), up(x)))``."""

    gate_up: Tensor  # [2I, H]: gate, then up
    down: Tensor  # [H, I]
    biases: tuple[Tensor, Tensor] | None = None  # [2I] and [H]


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
    prefix = moe_prefix(checkpoint, layer) + "experts."
    if prefix + "gate_up_proj" in checkpoint:  # all experts of the layer in two tensors
        num = config.moe.num_experts
        gate_up = checkpoint.read_slice(
            prefix + "gate_up_proj", expert, (num, 2 * size, hidden), dtype, device
        )
        down = checkpoint.read_slice(
            prefix + "down_proj", expert, (num, hidden, size), dtype, device
        )
        return ExpertWeights(gate_up, down)
    names = MIXTRAL_NAMES if f"{prefix}{expert}.w1.weight" in checkpoint else USUAL_NAMES
    gate_name, up_name, down_name = (f"{prefix}{expert}.{name}.weight" for name in names)
    gate = checkpoint.read(gate_name, (size, hidden), dtype, device)
    up = checkpoint.read(up_name, (size, hidden), dtype, device)
    down = checkpoint.read(down_name, (hidden, size), dtype, device)
    return ExpertWeights(torch.cat((gate, up)), down)
