"""One placement as one site sees it: its own slots, and who else holds what."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.links import Endpoint
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.epochs import Tenure
from moesaic.experts.slots import SlotTable
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.messages.substitution import Substitution


@dataclass(frozen=True, eq=False)
class SiteView:
    """A placement, seen from one of its workers; without one, a site that holds nothing.

    Attributes:
        epoch: 0 without a placement.
        table: the slots here.
        slot_of: slot of each expert here, by layer, int32 ``[E]``; -1: it is elsewhere.
        holders: indices of the other workers that hold an expert, by layer and expert.
        peers: the other workers, by index.
        substitution: how choices may be degraded.
        num_own: experts of a layer that the model itself has.
    """

    epoch: int
    table: SlotTable
    slot_of: Mapping[int, Tensor]
    holders: Mapping[int, tuple[tuple[int, ...], ...]]
    peers: Mapping[int, Endpoint]
    substitution: Substitution
    num_own: int
    _bases: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _lost: dict[frozenset[int], Mapping[int, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tenure: Tenure) -> "SiteView":
        """The view of a placement, which this process may be part of."""
        placement, me = tenure.placement, tenure.worker_idx
        slot_of, holders = {}, {}
        for layer, by_worker in zip(placement.layers, placement.slots, strict=True):
            slots = torch.full((placement.num_experts,), EMPTY_SLOT, dtype=torch.int32)
            mine = by_worker[me] if me >= 0 else []
            for slot, expert in reversed(list(enumerate(mine))):
                if expert != EMPTY_SLOT:
                    slots[expert] = slot
            slot_of[layer] = slots
            holders[layer] = tuple(
                tuple(idx for idx in found if idx != me) for found in placement.holders(layer)
            )
        peers = {
            idx: Endpoint.of(worker)
            for idx, worker in enumerate(placement.workers)
            if idx != me and worker.data_address
        }
        return cls(
            placement.epoch,
            tenure.table,
            slot_of,
            holders,
            peers,
            placement.substitution,
            placement.num_own,
        )

    @classmethod
    def alone(cls, layers: tuple[int, ...], num_experts: int) -> "SiteView":
        """The view of a process without a placement: every expert is elsewhere, and nobody holds one."""
        nowhere = torch.full((num_experts,), EMPTY_SLOT, dtype=torch.int32)
        return cls(
            epoch=0,
            table=SlotTable({}),
            slot_of=dict.fromkeys(layers, nowhere),
            holders=dict.fromkeys(layers, ((),) * num_experts),
            peers={},
            substitution=Substitution(),
            num_own=num_experts,
        )

    def basis_of(self, peer: int) -> Tensor:
        """The encoded basis of rows that ``peer`` alone shall compute."""
        if peer not in self._bases:
            self._bases[peer] = AssignmentBasis("static", (peer,)).encode()
        return self._bases[peer]

    def weights_id(self, expert: int) -> int:
        """Name an expert of this placement by its weights."""
        return self.substitution.weights_id(expert, self.num_own)

    @cached_property
    def held(self) -> Mapping[int, NDArray[np.bool_]]:
        """Experts that are in slots here, bool ``[E]`` by layer."""
        return {layer: slots.numpy() >= 0 for layer, slots in self.slot_of.items()}

    def lost(self, live: frozenset[int]) -> Mapping[int, Tensor]:
        """Find the experts, by layer, that neither this process nor any ``live`` peer holds, bool ``[num_own]``.

        Layers that lack none are left out.
        """
        found = self._lost.get(live)
        if found is None:
            found = self._lost[live] = dict(self._missing(live))
        return found

    def _missing(self, live: frozenset[int]) -> Iterator[tuple[int, Tensor]]:
        for layer, by_expert in self.holders.items():
            missing = ~self.held[layer][: self.num_own]
            for expert in np.flatnonzero(missing):
                missing[expert] = live.isdisjoint(by_expert[expert])
            if missing.any():
                yield layer, torch.from_numpy(missing)


@dataclass(frozen=True, kw_only=True)
class SiteStep(Step):
    """A step, and the view that it pins."""

    view: SiteView = field(repr=False, compare=False)
