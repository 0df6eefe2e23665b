"""The MLPs that every token passes: dense layers and shared experts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.models.architecture import ModelConfig
from moesaic.models.tensor_reader import TensorReader


@dataclass(frozen=True)
class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    gate_up: Tensor  # [2I, H]: gate, then up
    down: Tensor  # [H, I]

    @classmethod
    def load(cls, reader: TensorReader, hidden: int, size: int) -> "GatedMLP":
        """Read an MLP of inner width ``size``; raises ``CheckpointError``."""
        gate, up = (
            reader.read(f"{name}.weight", size, hidden) for name in ("gate_proj", "up_proj")
        )
        return cls(torch.cat((gate, up)), reader.read("down_proj.weight", hidden, size))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` -> ``[T, H]``."""
        gate, up = F.linear(hidden_states, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token of a sparse layer passes, in Qwen2-MoE weighted by a gate of its own."""

    mlp: GatedMLP
    gate: Tensor | None  # [1, H]

    @classmethod
    def load(cls, reader: TensorReader, config: ModelConfig) -> "SharedExpert | None":
        """Read a sparse layer's shared expert, if the model has any; raises ``CheckpointError``."""
        moe, hidden = config.moe, config.hidden_size
        if not moe.shared_expert_size:
            return None
        name = "shared_expert." if moe.shared_expert_gated else "shared_experts."
        return cls(
            GatedMLP.load(reader.under(name), hidden, moe.shared_expert_size),
            reader.read("shared_expert_gate.weight", 1, hidden)
            if moe.shared_expert_gated
            else None,
        )

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` -> ``[T, H]``."""
        output = self.mlp(hidden_states)
        if self.gate is None:
            return output
        return F.linear(hidden_states, self.gate).sigmoid() * output
