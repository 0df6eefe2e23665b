"""``local``: all experts are in this process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.substitution import LoadedSubstitution, SubstitutionLoader, with_united
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.pace import LoadPace
from moesaic.experts.slots import SlotTable, load_table
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.decoder_step import RoutedExpertsKernel
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import Gate, load_gates
from moesaic.models.weights.checkpoint import Checkpoint


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """All experts of a process, then the united ones of one substitution.

    Attributes:
        gates: gates by decoder layer.
        table: every layer's experts, each in its own slot, then its united ones.
        substitutions: how each layer is degraded; none if it cannot be.
    """

    gates: Mapping[int, Gate]
    table: SlotTable
    substitutions: Mapping[int, LayerSubstitution] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> dict[int, RoutedExpertsKernel]:
        """Kernels by layer, for a decoder that computes them itself: ``Decoder.whole_steps``."""
        packed = {layer: slots.packed for layer, slots in self.table.layers.items()}
        kernels = {
            at: self.gates[at].before(slots, self.substitutions.get(at))
            for at, slots in packed.items()
            if slots
        }
        return {layer: kernel for layer, kernel in kernels.items() if kernel}

    def compute(
        self, layer: int, hidden_states: Tensor, promised: PromisedRows | None = None
    ) -> Tensor:
        """See ``Dispatcher.dispatch``."""
        topk_weights, topk_ids = self.gates[layer](hidden_states)
        if promised is not None:
            split_choices(topk_ids, topk_weights, promised, self.substitutions[layer])
        combined = self.table.compute(layer, hidden_states, topk_weights, topk_ids, mine=None)
        return combined.to(hidden_states.dtype)

    def with_substitution(self, loaded: LoadedSubstitution | None) -> "LocalExperts":
        """The same experts, degraded in another way."""
        table = with_united(self.table, loaded)
        return LocalExperts(self.gates, table, loaded.layers if loaded else {})


@dataclass(frozen=True, kw_only=True)
class LocalStep(Step):
    """A step, and its experts."""

    experts: LocalExperts = field(repr=False, compare=False)


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
        num_experts = config.moe.num_experts
        everything = dict.fromkeys(config.moe_layers, tuple(range(num_experts)))
        table = load_table(checkpoint, config, everything, dtype, device, quantization).table
        self._experts = LocalExperts(load_gates(checkpoint, config, dtype, device), table)
        self._step = _step_of(self._experts, None)  # one for all: no frame carries it
        files = ExpertFiles(checkpoint, config, dtype, device, quantization, for_peers=False)
        load = files.bring(LoadPace())

        def bring(layer: int, expert: int) -> GatedMLP:
            return load(layer, expert).mlp

        self.substitutions = SubstitutionLoader(
            files.experts, config.moe_layers, num_experts, bring
        )

    @property
    def waiting_for(self) -> list[str]:
        """Nothing, ever."""
        return []

    @property
    def kernels(self) -> dict[int, RoutedExpertsKernel]:
        """See ``LocalExperts.kernels``; of steps that begin now."""
        return self._step.experts.kernels

    def degraded(
        self, loaded: LoadedSubstitution, hidden_states: Tensor, promised: PromisedRows
    ) -> Tensor:
        """See ``Degrading.degraded``."""
        experts = self._experts.with_substitution(loaded)
        return experts.compute(min(loaded.layers), hidden_states, promised)

    def adopt(self, loaded: LoadedSubstitution | None) -> None:
        """See ``Degrading.adopt``."""
        self._step = _step_of(self._experts.with_substitution(loaded), loaded)

    def begin_step(self) -> LocalStep:
        """A step of the one placement there is."""
        return self._step

    def end_step(self, step: Step) -> None:
        """Nothing is pinned."""

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        """See ``Dispatcher.dispatch``; nothing here can be unreachable."""
        assert isinstance(step, LocalStep)
        return step.experts.compute(layer, hidden_states, promised)

    async def reachable(self) -> None:
        """Returns at once."""


def _step_of(experts: LocalExperts, loaded: LoadedSubstitution | None) -> LocalStep:
    return LocalStep(
        os.urandom(16),
        epoch=0,
        experts=experts,
        substitution=loaded.substitution if loaded else None,
    )
