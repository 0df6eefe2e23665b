"""Substitutions of dispatchers that compute all experts in their own process."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.messages.substitution import Substitution


@dataclass(frozen=True)
class LoadedSubstitution:
    """A substitution, and all that it takes to compute with it.

    Attributes:
        substitution: the way to degrade.
        layers: the same of each decoder layer with experts.
        united: united experts of the substitution, by layer.
    """

    substitution: Substitution
    layers: Mapping[int, LayerSubstitution]
    united: Mapping[int, tuple[GatedMLP, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of the united experts."""
        return sum(mlp.nbytes for mlps in self.united.values() for mlp in mlps)


def with_united(table: SlotTable, loaded: LoadedSubstitution | None) -> SlotTable:
    """Put the united experts of a substitution into slots after the layer's own experts, in each layer of a table."""
    if loaded is None:
        return table
    layers = {}
    for layer, slots in table.layers.items():
        first, united = len(slots.experts), loaded.united[layer]
        numbers = range(first, first + len(united))
        layers[layer] = LayerSlots((*slots.experts, *numbers), (*slots.mlps, *united))
    return SlotTable(layers)


class SubstitutionLoader:
    """Brings united experts into memory, on any thread that may compute."""

    def __init__(
        self,
        experts: LogicalExperts,
        layers: Iterable[int],
        num_experts: int,
        bring: Callable[[int, int], GatedMLP],
        most: int | None = None,
    ) -> None:
        """
        Args:
            experts: knows what it costs to degrade them.
            layers: decoder layers with experts.
            num_experts: experts of each layer, without united ones.
            bring: loads an expert, given its layer and weights id.
            most: united experts of all layers together that fit into memory; None: any number.
        """
        self._experts, self._layers, self._num_experts = experts, tuple(layers), num_experts
        self._bring, self._most = bring, most

    def load(self, substitution: Substitution) -> LoadedSubstitution:
        """Read the united experts of a substitution.

        Raises:
            CheckpointError: one cannot be read.
            InvalidInput: there is no memory for them.
        """
        first, num_united = self._num_experts, substitution.num_united(self._num_experts)
        if self._most is not None and (needed := num_united * len(self._layers)) > self._most:
            raise InvalidInput(
                "expert_memory_bytes",
                f"leaves room for {self._most} united experts, but way {substitution.way} has {needed}; give more "
                "memory, or set a larger way",
            )
        ids = [substitution.weights_id(first + j, first) for j in range(num_united)]
        united = {layer: tuple(self._bring(layer, each) for each in ids) for layer in self._layers}
        layers = {
            layer: self._experts.layer_substitution(layer, substitution) for layer in self._layers
        }
        return LoadedSubstitution(substitution, layers, united)


class Degrading(Protocol):
    """A dispatcher whose substitution can be changed while it serves."""

    @property
    def substitutions(self) -> SubstitutionLoader:
        """Loads a substitution, before it is adopted."""
        ...

    def degraded(
        self, loaded: LoadedSubstitution, hidden_states: Tensor, promised: PromisedRows
    ) -> Tensor:
        """Compute made-up rows by the experts of one layer, degraded by a substitution that is not adopted yet.

        Any thread may call it.
        """
        ...

    def adopt(self, loaded: LoadedSubstitution | None) -> None:
        """Degrade by this substitution in steps that begin from now on; None: in no way. On the engine's thread."""
        ...
