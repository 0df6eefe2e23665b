"""``gathered``, ``offload`` and both: every expert of a layer comes here before its rows.

Dispatch is then local, and no worker waits for another at any layer (MoE-Prefill section 6.2).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.gathered import metrics
from moesaic.dispatch.gathered.plan import GatherPlan
from moesaic.dispatch.gathered.ring import Fill, Ring
from moesaic.dispatch.substitution import LoadedSubstitution, SubstitutionLoader, with_united
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.promised import PromisedRows
from moesaic.models.layers.gate import Gate


@dataclass(frozen=True)
class _Experts:
    """All experts as one step finds them, then the united ones of its substitution.

    Attributes:
        resident: experts of the first layer.
        tables: experts of the other layers, for each buffer of the ring.
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
    ) -> None:
        """
        Args:
            plan: the place of each expert.
            layout: layout of one expert.
            gates: gates by decoder layer.
            resident: the first layer's experts, uint8 ``[E, nbytes]``.
            held: experts of each gathered layer that stay in memory, uint8 ``[n, nbytes]``.
            memory: memory of each buffer of the ring, uint8 ``[len(plan.gathered), nbytes]``.
            start: begins to fill a buffer; returns at once.
            substitutions: loads united experts, which stay in memory.
        """
        self._gates, self._first = gates, plan.layers[0]
        everything = tuple(range(plan.num_experts))
        mlps = tuple(layout.view(row) for row in resident)
        self.substitutions = substitutions
        first = SlotTable({self._first: LayerSlots(everything, mlps)})
        kept = {layer: [layout.view(row) for row in rows] for layer, rows in held.items()}
        tables = []
        for rows in memory:
            gathered = [layout.view(row) for row in rows]
            layers = {}
            for layer in plan.gathered_layers:
                by_expert = dict(zip(plan.gathered, gathered, strict=True))
                by_expert |= zip(plan.in_memory, kept.get(layer, ()), strict=True)
                layers[layer] = LayerSlots(everything, tuple(by_expert[e] for e in everything))
            tables.append(SlotTable(layers))
        self._own = self._experts = _Experts(first, tuple(tables))
        self._gathered = plan.gathered_layers
        self._ring = Ring(self._gathered, plan.num_buffers, start) if self._gathered else None
        self._waits = {layer: metrics.WAIT_SECONDS.labels(layer) for layer in self._gathered}
        self._layers = {layer: metrics.LAYERS.labels(layer) for layer in self._gathered}
        self._stamps: list[tuple[float, float]] = []  # of this step's layers: entered, waited
        # True if this step computed the first layer: slices of sweeps mostly do not.
        self._began = False
        self._held: Fill | None = None  # a slice's layer: the next slice may be of the same one
        self.compute_s: tuple[float, ...] = ()  # of the last whole step's layers, without waits
        self.wait_s: tuple[float, ...] = ()

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
        self._stamps, self._began = [], False
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
        if len(self._stamps) == 1 + len(self._gathered):
            entered = [at for at, _ in self._stamps] + [time.perf_counter()]
            self.wait_s = tuple(waited for _, waited in self._stamps)
            spans = zip(entered[1:], entered[:-1], self.wait_s, strict=True)
            self.compute_s = tuple(end - begin - waited for end, begin, waited in spans)
        elif self._ring is not None and self._began:
            self._enter(self._ring, self._gathered[0])
        self._stamps, self._began = [], False

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
        entered = time.perf_counter()
        topk_weights, topk_ids = self._gates[layer](hidden_states)
        assert isinstance(step, _GatheredStep)
        experts = step.experts
        if promised is not None:
            # Or the step had no substitution.
            assert experts.loaded is not None
            split_choices(topk_ids, topk_weights, promised, experts.loaded.layers[layer])
        if layer == self._first or self._ring is None:
            self._began = True
            self._stamps.append((entered, 0.0))
            combined = experts.resident.compute(layer, hidden_states, topk_weights, topk_ids, None)
            return combined.to(hidden_states.dtype)
        fill = self._enter(self._ring, layer)
        waited_s = 0.0
        if not fill.done.done():
            begun = time.perf_counter()
            await fill.ended()
            waited_s = time.perf_counter() - begun
            self._waits[layer].inc(waited_s)
        # Raises the error of the fill.
        fill.done.result()
        self._layers[layer].inc()
        self._stamps.append((entered, waited_s))
        table = experts.tables[fill.buffer]
        combined = table.compute(layer, hidden_states, topk_weights, topk_ids, None)
        if self._began:
            self._ring.leave(fill)
        else:
            self._held = fill
        return combined.to(hidden_states.dtype)

    def _enter(self, ring: Ring, layer: int) -> Fill:
        held, self._held = self._held, None
        if held is not None and held.layer != layer:
            ring.leave(held)
        return ring.enter(layer)

    async def reachable(self) -> None:
        """Returns at once."""
