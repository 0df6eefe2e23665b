"""Rungs of dispatchers that compute all experts in their own process."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moesaic.errors import InvalidInput
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.promised import LayerRung
from moesaic.messages.rung import Rung


@dataclass(frozen=True)
class LoadedRung:
    """A rung, and all that it takes to compute with it.

    Attributes:
        rung: the way to degrade.
        layers: the same of each decoder layer with experts.
        united: united experts of the rung, by layer.
    """

    rung: Rung
    layers: Mapping[int, LayerRung]
    united: Mapping[int, tuple[GatedMLP, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of the united experts."""
        return sum(mlp.nbytes for mlps in self.united.values() for mlp in mlps)


def with_united(table: SlotTable, loaded: LoadedRung | None) -> SlotTable:
    """Put the united experts of a rung into slots after the layer's own experts, in each layer of a table."""
    if loaded is None:
        return table
    layers = {}
    for layer, slots in table.layers.items():
        first, united = len(slots.experts), loaded.united[layer]
        numbers = range(first, first + len(united))
        layers[layer] = LayerSlots((*slots.experts, *numbers), (*slots.mlps, *united))
    return SlotTable(layers)


class RungLoader:
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

    def load(self, rung: Rung) -> LoadedRung:
        """Read the united experts of a rung.

        Raises:
            CheckpointError: one cannot be read.
            InvalidInput: there is no memory for them.
        """
        first, num_united = self._num_experts, rung.num_united(self._num_experts)
        if self._most is not None and (needed := num_united * len(self._layers)) > self._most:
            raise InvalidInput(
                "expert_memory_bytes",
                f"leaves room for {self._most} united experts, but way {rung.way} has {needed}; give more "
                "memory, or set a larger way",
            )
        ids = [rung.weights_id(first + j, first) for j in range(num_united)]
        united = {layer: tuple(self._bring(layer, each) for each in ids) for layer in self._layers}
        layers = {layer: self._experts.layer_rung(layer, rung) for layer in self._layers}
        return LoadedRung(rung, layers, united)


class Degrading(Protocol):
    """A dispatcher whose rung can be changed while it serves."""

    @property
    def rungs(self) -> RungLoader:
        """Loads a rung, before it is adopted."""
        ...

    def adopt(self, loaded: LoadedRung | None) -> None:
        """Degrade by this rung in steps that begin from now on; None: in no way. On the engine's thread."""
        ...
