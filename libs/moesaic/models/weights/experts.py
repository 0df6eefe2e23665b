"""Read one routed expert's weights, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.stored_weights import StoredWeight, dequantised, take_rows
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.reading import joined, read_entry, read_matrix
from moesaic.models.weights.formats.rounding import rounded
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: ``down(activation(gate(x), up(x)))``."""

    gate_up: StoredWeight  # [2I, H]: gate, then up
    down: StoredWeight  # [H, I]
    biases: tuple[Tensor, Tensor] | None = None  # [2I] and [H]

    def numbers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what both matrices stand for."""
        return dequantised(self.gate_up, dtype), dequantised(self.down, dtype)

    def rounded(self, form: WeightForm | None) -> "ExpertWeights":
        """Return the same with its matrices in ``form``, see there."""
        return ExpertWeights(rounded(self.gate_up, form), rounded(self.down, form), self.biases)


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
    layout = sparse_names(config, checkpoint, layer)
    names = [prefix + name for name in layout.experts]
    if len(names) == 2:  # all experts of the layer in two tensors
        num = config.moe.num_experts

        def matrix(name: str, num_out: int, num_in: int) -> StoredWeight:
            if layout.by_turns and name in checkpoint:  # codes do not lie the other way round
                shape = num, num_in, num_out
                return checkpoint.read_slice(name, expert, shape, dtype, device).T.contiguous()
            shape = num, num_out, num_in
            return read_entry(checkpoint, weight_format, name, expert, shape, dtype, device)

        def bias(name: str, size: int) -> Tensor:
            return checkpoint.read_slice(prefix + name, expert, (num, size), dtype, device)

        gate_up, down = matrix(names[0], 2 * size, hidden), matrix(names[1], hidden, size)
        order = torch.arange(2 * size)
        if layout.by_turns:
            order = torch.cat((order[::2], order[1::2]))
            gate_up = take_rows(gate_up, order)
        if not config.moe.expert_bias:
            return ExpertWeights(gate_up, down)
        of_gate_up, of_down = bias(layout.biases[0], 2 * size), bias(layout.biases[1], hidden)
        return ExpertWeights(gate_up, down, (of_gate_up[order], of_down))
    shapes = (size, hidden), (size, hidden), (hidden, size)
    gate, up, last = (
        read_matrix(checkpoint, weight_format, name.format(expert), shape, dtype, device)
        for name, shape in zip(names, shapes, strict=True)
    )
    gate_up = joined((gate, up), dtype)
    coded = device.type == "cpu" and weight_format is not None and weight_format.held is not None
    if coded and (isinstance(gate_up, Tensor) or isinstance(last, Tensor)):
        raise CheckpointError(
            "config.json",
            "quantization_config: experts that are quantised in part, or not all, are not supported",
            tensor=names[0].format(expert),
        )
    return ExpertWeights(gate_up, last)
