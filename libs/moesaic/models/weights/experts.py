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
    layout = sparse_names(config, checkpoint, layer)
    names = [prefix + name for name in layout.experts]
    if len(names) == 2:  # all experts of the layer in two tensors

        def read(name: str, *shape: int) -> Tensor:
            whole = config.moe.num_experts, *shape
            return checkpoint.read_slice(name, expert, whole, dtype, device)

        of_gate_up, of_down = (2 * size, hidden), (hidden, size)
        if layout.by_turns:
            gate_up = _apart(read(names[0], *reversed(of_gate_up)).T)
            down = read(names[1], *reversed(of_down)).T.contiguous()
        else:
            gate_up, down = read(names[0], *of_gate_up), read(names[1], *of_down)
        if not config.moe.expert_bias:
            return ExpertWeights(gate_up, down)
        bias_names = [prefix + name for name in layout.biases]
        bias, down_bias = read(bias_names[0], 2 * size), read(bias_names[1], hidden)
        bias = _apart(bias) if layout.by_turns else bias
        return ExpertWeights(gate_up, down, (bias, down_bias))
    gate_name, up_name, down_name = (name.format(expert) for name in names)
    gate = checkpoint.read(gate_name, (size, hidden), dtype, device)
    up = checkpoint.read(up_name, (size, hidden), dtype, device)
    down = checkpoint.read(down_name, (hidden, size), dtype, device)
    return ExpertWeights(torch.cat((gate, up)), down)


def _apart(taking_turns: Tensor) -> Tensor:
    """Bring all gates before all ups, along the first axis."""
    return torch.cat((taking_turns[::2], taking_turns[1::2]))
