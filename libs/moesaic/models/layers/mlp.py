"""The MLPs that every token passes: dense layers and shared experts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.linear import Linear, make_linear
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.family import mlp_names
from moesaic.models.weights.tensor_names import sparse_names
from moesaic.models.weights.tensor_reader import TensorReader


def load_mlp(
    reader: TensorReader, hidden: int, size: int, names: Sequence[str] = mlp_names("mlp.")
) -> GatedMLP:
    """Read an MLP of inner width ``size``, whose gate and up may be one tensor; raises ``CheckpointError``."""
    *parts, last = names
    gate_up = [reader.weight(name, 2 * size // len(parts), hidden) for name in parts]
    return reader.mlp(reader.joined(*gate_up), reader.weight(last, hidden, size))


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token of a sparse layer passes, in Qwen2-MoE weighted by a gate of its own."""

    mlp: GatedMLP
    gate: Linear | None  # H -> 1

    @classmethod
    def load(cls, reader: TensorReader, config: ModelConfig, layer: int) -> "SharedExpert | None":
        """Read a sparse layer's shared expert, if the model has any; raises ``CheckpointError``."""
        moe, hidden = config.moe, config.hidden_size
        if not moe.shared_expert_size:
            return None
        names = sparse_names(config, reader.checkpoint, layer)
        return cls(
            load_mlp(reader, hidden, moe.shared_expert_size, names.shared),
            make_linear(reader.read(names.shared_gate, 1, hidden))
            if moe.shared_expert_gated
            else None,
        )

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` -> ``[T, H]``."""
        output = self.mlp(hidden_states)
        if self.gate is None:
            return output
        # In float64: the last bit of a float32 sigmoid depends on where in the tensor it stands.
        return self.gate(hidden_states).double().sigmoid().to(output.dtype) * output
