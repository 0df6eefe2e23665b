"""``local``: all experts are in this process."""

import os

import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.experts.slots import load_table
from moesaic.kernels.decoder_step import RoutedExpertsKernel
from moesaic.kernels.linear import Quantization
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint


class LocalDispatcher:
    """Computes every expert itself; its epoch is 0 and never changes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
    ) -> None:
        """Read the gates and all experts of ``checkpoint``."""
        everything = list(range(config.moe.num_experts))
        self._step = Step(os.urandom(16), epoch=0)  # one for all: no frame carries it
        self._gates = load_gates(checkpoint, config, dtype, device)
        self._table = load_table(
            checkpoint,
            config,
            dict.fromkeys(config.moe_layers, everything),
            dtype,
            device,
            quantization,
        ).table

    @property
    def waiting_for(self) -> list[str]:
        """Nothing, ever."""
        return []

    @property
    def kernels(self) -> dict[int, RoutedExpertsKernel]:
        """Kernels by layer, for a decoder that computes them itself: ``Decoder.whole_steps``."""
        packed = {layer: slots.packed for layer, slots in self._table.layers.items()}
        kernels = {at: self._gates[at].before(slots) for at, slots in packed.items() if slots}
        return {layer: kernel for layer, kernel in kernels.items() if kernel}

    def begin_step(self) -> Step:
        """A step of the one placement there is."""
        return self._step

    def end_step(self, step: Step) -> None:
        """Nothing is pinned."""

    async def dispatch(self, step: Step, layer: int, hidden_states: Tensor) -> Tensor:
        """See ``Dispatcher.dispatch``; nothing here can be unreachable."""
        topk_weights, topk_ids = self._gates[layer](hidden_states)
        combined = self._table.compute(layer, hidden_states, topk_weights, topk_ids, mine=None)
        return combined.to(hidden_states.dtype)

    async def reachable(self) -> None:
        """Returns at once."""
