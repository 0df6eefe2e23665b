"""The gate: the learned layer that picks each token's top-k experts."""

import torch
from torch import Tensor

from moesaic.kernels.decoder_step import RoutedExpertsKernel
from moesaic.kernels.linear import PackedLinear, activation_dtype, make_linear
from moesaic.kernels.packed_experts import PackedSlots
from moesaic.kernels.promised import LayerSubstitution
from moesaic.models.configuration.architecture import ModelConfig, MoE
from moesaic.models.layers.gating import Gating
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names


class Gate:
    """The gate of one layer."""

    def __init__(
        self,
        weight: Tensor,
        moe: MoE,
        correction: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Take ``weight`` ``[E, H]``, and where there are, float32 corrections ``[E]`` and biases ``[E]``."""
        self._dtype = activation_dtype(weight.dtype, weight.device)
        self._linear, self._moe = make_linear(weight, bias), moe
        self._gating = Gating(moe, correction)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Gate":
        """Read the gate of decoder layer ``layer``.

        Raises:
            CheckpointError: its tensor is missing, mis-shaped or cannot be read.
        """
        shape = (config.moe.num_experts, config.hidden_size)
        gate_dtype = torch.float32 if config.moe.float32_gate else dtype
        names, prefix = sparse_names(config, checkpoint, layer), layer_prefix(layer)
        weight = checkpoint.read(prefix + names.gate, shape, gate_dtype, device)
        correction = bias = None
        if config.moe.correction_bias:
            size = (*names.correction_axes, config.moe.num_experts)
            name = prefix + names.correction
            correction = checkpoint.read(name, size, torch.float32, device).flatten()
        if config.moe.gate_bias:
            bias = checkpoint.read(prefix + names.gate_bias, shape[:1], gate_dtype, device)
        return cls(weight, config.moe, correction, bias)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for the rows of ``hidden_states`` ``[T, H]``.

        Returns:
            topk_weights: float32 ``[T, k]``, normalised and scaled as the family demands, ready to
                multiply expert outputs with; topk_ids: int32 ``[T, k]``, the best first.
        """
        hidden_states, gate = hidden_states.to(self._dtype), self._linear
        if isinstance(gate, PackedLinear):
            return self._gating.choose(hidden_states, gate.matrix)
        return self._gating.select(gate(hidden_states))

    def before(
        self, slots: PackedSlots, layer: LayerSubstitution | None = None
    ) -> RoutedExpertsKernel | None:
        """Combine this gate with all of the layer's experts, each in its own slot, for whole steps.

        Args:
            slots: slots of these experts, then those of the united ones of ``layer``.
            layer: how choices are degraded; None: there are no united experts.

        Returns:
            None if such a step cannot be one call.
        """
        gate, moe = self._linear, self._moe
        if not isinstance(gate, PackedLinear):
            return None
        substitution = layer or LayerSubstitution(moe.num_experts)
        return RoutedExpertsKernel(gate.matrix, slots, substitution, self._gating)


def load_gates(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[int, Gate]:
    """Read the gates of all sparse layers, by decoder layer.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped or cannot be read.
    """
    return {
        layer: Gate.load(checkpoint, config, layer, dtype, device) for layer in config.moe_layers
    }
