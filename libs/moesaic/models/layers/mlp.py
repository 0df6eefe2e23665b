"""The MLPs that every token passes: dense layers and shared experts."""

from dataclasses import dataclass

from torch import Tensor

from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.linear import Linear, make_linear
from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.weights.tensor_reader import TensorReader


def load_mlp(reader: TensorReader, hidden: int, size: int) -> GatedMLP:
    """Read an MLP of inner width ``size``; raises ``CheckpointError``."""
    gate, up = (reader.weight(name, size, hidden) for name in ("gate_proj", "up_proj"))
    down = reader.weight("down_proj", hidden, size)
    return reader.mlp(reader.joined(gate, up), down)


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token of a sparse layer passes, in Qwen2-MoE weighted by a gate of its own."""

    mlp: GatedMLP
    gate: Linear | None  # H -> 1

    @classmethod
    def load(cls, reader: TensorReader, config: ModelConfig) -> "SharedExpert | None":
        """Read a sparse layer's shared expert, if the model has any; raises ``CheckpointError``."""
        moe, hidden = config.moe, config.hidden_size
        if not moe.shared_expert_size:
            return None
        name = "shared_expert." if moe.shared_expert_gated else "shared_experts."
        return cls(
            load_mlp(reader.under(name), hidden, moe.shared_expert_size),
            make_linear(reader.read("shared_expert_gate.weight", 1, hidden))
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
