"""Read one routed expert's weights, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names


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
    prefix = layer_prefix(layer)
    names = [prefix + name for name in sparse_names(config, checkpoint, layer).experts]
    if len(names) == 2:  # all experts of the layer in two tensors
        num, (together, down_name) = config.moe.num_experts, names
        gate_up = checkpoint.read_slice(together, expert, (num, 2 * size, hidden), dtype, device)
        down = checkpoint.read_slice(down_name, expert, (num, hidden, size), dtype, device)
        return ExpertWeights(gate_up, down)
    gate_name, up_name, down_name = (name.format(expert) for name in names)
    gate = checkpoint.read(gate_name, (size, hidden), dtype, device)
    up = checkpoint.read(up_name, (size, hidden), dtype, device)
    down = checkpoint.read(down_name, (hidden, size), dtype, device)
    return ExpertWeights(torch.cat((gate, up)), down)
