"""``gathered``, ``offload`` and both: every expert of a layer comes here before its rows.

Dispatch is then local, and no worker waits for another at any layer (MoE-Prefill section 6.2).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import itemgetter

from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.device import DeviceBuffers
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.gathered.ring import Fill, Ring
from moesaic.dispatch.gathered.times import DeviceClock, HostClock, LayerTimes
from moesaic.dispatch.substitution import LoadedSubstitution, SubstitutionLoader, with_united
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.promised import PromisedRows
from moesaic.models.layers.gate import Gate


@dataclass(frozen=True)
class _Experts:
    """All experts as one step finds them, then the united ones of its substitution.

    Attributes:
        resident: experts of the first layer.
        tables: experts of the other layers, for each buffer.
        loaded: the substitution; None: there is none.
    """

    resident: SlotTable
    tables: tuple[SlotTable, ...]
    loaded: LoadedSubstitution | None = None


@dataclass(frozen=True, kw_only=True)
class _GatheredStep(Step):
    """A step, and its experts."""

    experts: _Experts = field(repr=False, compare=False)


class GatheredDispatcher:
    """Computes with experts that are in memory or have come through the ring. Its epoch is 0."""

    def __init__(
        self,
        plan: GatherPlan,
        layout: ExpertLayout,
        gates: Mapping[int, Gate],
        resident: Tensor,
        held: Mapping[int, Tensor],
        memory: Sequence[Tensor],
        start: Callable[[Fill], None],
        substitutions: SubstitutionLoader,
        device: DeviceBuffers | None = None,
    ) -> None:
        """
        Args:
            plan: the place of each expert.
            layout: layout of one expert.
            gates: gates by decoder layer.
            resident: the first layer's experts, uint8 ``[E, nbytes]``.
            held: experts of each gathered layer that are computed where they stay, uint8
                ``[n, nbytes]``; not those of a device.
            memory: the host's memory of each buffer of the ring, uint8
                ``[len(plan.gathered), nbytes]``.
            start: begins to fill a buffer; returns at once.
            substitutions: loads united experts, which stay in memory.
            device: buffers on the device that computes, where all of a layer's experts come;
                ``None``: the host computes.
        """
        self._gates, self._first = gates, plan.layers[0]
        self.substitutions, self._device = substitutions, device
        slots = LayerSlots(tuple(range(plan.num_experts)), tuple(map(layout.view, resident)))
        first, layers = SlotTable({self._first: slots}), plan.gathered_layers
        if device is None:
            kept = {layer: [layout.view(row) for row in rows] for layer, rows in held.items()}
            tables = [
                _host_table(plan, [layout.view(row) for row in rows], kept) for rows in memory
            ]
        else:
            # One for all layers, so a GPU has the addresses of a buffer once.
            tables = [
                SlotTable(dict.fromkeys(layers, _slots(plan.buffered, map(layout.view, rows))))
                for rows in device.memory
            ]
        self._own = self._experts = _Experts(first, tuple(tables))
        self._gathered = plan.gathered_layers
        self._ring = Ring(self._gathered, plan.num_buffers, start) if self._gathered else None
        self._waits = {layer: metrics.WAIT_SECONDS.labels(layer) for layer in self._gathered}
        self._layers = {layer: metrics.LAYERS.labels(layer) for layer in self._gathered}
        clock = DeviceClock(device.streams) if device else HostClock()
        self._times = LayerTimes(clock, lambda layer, wait_s: self._waits[layer].inc(wait_s))
        # True if this step computed the first layer: slices of sweeps mostly do not.
        self._began = False
        self._held: Fill | None = None  # a slice's layer: the next slice may be of the same one

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Times of the last whole step's layers, without waits; waits for a device."""
        return self._times.compute_s

    @property
    def wait_s(self) -> tuple[float, ...]:
        """Times that they waited for experts; waits for a device."""
        return self._times.wait_s

    def degraded(
        self, loaded: LoadedSubstitution, hidden_states: Tensor, promised: PromisedRows
    ) -> Tensor:
        """See ``Degrading.degraded``; by the first layer's experts, which never move."""
        first, (topk_weights, topk_ids) = self._first, self._gates[self._first](hidden_states)
        split_choices(topk_ids, topk_weights, promised, loaded.layers[first])
        table = with_united(self._own.resident, loaded)
        return table.compute(first, hidden_states, topk_weights, topk_ids, None)

    def adopt(self, loaded: LoadedSubstitution | None) -> None:
        """See ``Degrading.adopt``; a step in progress keeps its own."""
        own = self._own
        tables = tuple(with_united(table, loaded) for table in own.tables)
        self._experts = _Experts(with_united(own.resident, loaded), tables, loaded)

    def prime(self) -> None:
        """Begin to gather the first layers; once, before the first step."""
        if self._ring is not None:
            self._ring.prime()

    @property
    def waiting_for(self) -> list[str]:
        """Nothing: experts that no peer gives come from the checkpoint."""
        return []

    def begin_step(self) -> Step:
        """A step of the one placement there is."""
        self._times.begin()
        self._began = False
        return _GatheredStep(
            os.urandom(16),
            epoch=0,
            experts=self._experts,
            substitution=self._experts.loaded.substitution if self._experts.loaded else None,
        )

    def end_step(self, step: Step) -> None:
        """Note the step's times.

        A step that began and did not come to its end gathers the first layers anew. A slice of one
        layer leaves that layer where it is.
        """
        whole = self._times.end(1 + len(self._gathered))
        if not whole and self._ring is not None and self._began:
            self._enter(self._ring, self._gathered[0])
        self._began = False

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        """See ``Dispatcher.dispatch``.

        Raises:
            ExpertUnavailable: neither peers nor files could give the layer's experts.
            CheckpointError: they had to be read from the checkpoint, which is damaged.
        """
        topk_weights, topk_ids = self._gates[layer](hidden_states)
        assert isinstance(step, _GatheredStep)
        experts, entered = step.experts, self._times.now()
        if promised is not None:
            # Or the step had no substitution.
            assert experts.loaded is not None
            split_choices(topk_ids, topk_weights, promised, experts.loaded.layers[layer])
        if layer == self._first or self._ring is None:
            self._began = True
            self._times.at(layer, entered)
            combined = experts.resident.compute(layer, hidden_states, topk_weights, topk_ids, None)
            return combined.to(hidden_states.dtype)
        fill, waited = self._enter(self._ring, layer), self._device is not None
        if not fill.done.done():
            waited = True
            await fill.ended()
        # Raises the error of the fill.
        fill.done.result()
        self._layers[layer].inc()
        with self._device.reading(fill) if self._device else nullcontext():
            self._times.at(layer, entered, self._times.now() if waited else None)
            table = experts.tables[fill.buffer]
            combined = table.compute(layer, hidden_states, topk_weights, topk_ids, None)
        if self._began:
            self._ring.leave(fill)
        else:
            self._held = fill
        return combined.to(hidden_states.dtype)

    async def made_up(self, layer: int, hidden_states: Tensor) -> Tensor:
        """Compute rows of a made-up step with the first layer's experts, which never move.

        Args:
            layer: index of a decoder layer with experts: all are alike.
            hidden_states: ``[T, H]``.

        Returns:
            ``[T, H]``, of the same dtype.
        """
        first, chosen = self._first, self._gates[self._first](hidden_states)
        combined = self._own.resident.compute(first, hidden_states, *chosen, None)
        return combined.to(hidden_states.dtype)

    def _enter(self, ring: Ring, layer: int) -> Fill:
        held, self._held = self._held, None
        if held is not None and held.layer != layer:
            ring.leave(held)
        return ring.enter(layer)

    async def reachable(self) -> None:
        """Returns at once."""


def _slots(experts: Iterable[int], mlps: Iterable[GatedMLP]) -> LayerSlots:
    """Put each expert into the slot of its number."""
    by_expert = dict(sorted(zip(experts, mlps, strict=True), key=itemgetter(0)))
    return LayerSlots(tuple(by_expert), tuple(by_expert.values()))


def _host_table(
    plan: GatherPlan, gathered: Sequence[GatedMLP], kept: Mapping[int, Sequence[GatedMLP]]
) -> SlotTable:
    """Experts of a buffer of the ring, and of each layer those that stay in memory."""
    experts = plan.gathered + plan.in_memory
    return SlotTable(
        {
            layer: _slots(experts, [*gathered, *kept.get(layer, ())])
            for layer in plan.gathered_layers
        }
    )
