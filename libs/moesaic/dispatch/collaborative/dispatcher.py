"""``collaborative``: local experts here, rows of others to whichever source is cheapest now (DanceMoE section III-A).

The gate runs here. Rows that want experts of other sites are sent first, one message for each site
and layer, and travel while the experts in slots here compute. If a site does not answer, its rows
go to another holder, then to the files of this machine. Otherwise their choices are dropped, if the
request allows that. Else the step fails with an error that names the missing experts, and is
retried.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.dispatch.collaborative import metrics
from moesaic.dispatch.collaborative.file_cache import FileCache
from moesaic.dispatch.collaborative.parts import LayerBatch
from moesaic.dispatch.collaborative.peers import PeerAsk, Peers
from moesaic.dispatch.collaborative.sources import FILES, FileCost, choose_sources
from moesaic.dispatch.collaborative.view import SiteStep, SiteView
from moesaic.dispatch.contract import Step
from moesaic.errors import CheckpointError, ExpertUnavailable, MoesaicError, NotReady
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.brownout.logical import SubstitutionOf
from moesaic.experts.epochs import Epochs
from moesaic.experts.slots import LayerSlots
from moesaic.experts.wire_rows import from_wire, row_bytes, to_wire
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.messages.substitution import Substitution
from moesaic.messages.wire import WireDtype
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import Gate
from moesaic.telemetry.metrics import series
from moesaic.transport.frame import Frame

log = structlog.get_logger()

AT_ONCE = 4  # experts from files in memory for a batch, beside those that are kept
BESIDE_ROWS = 64  # fewer compute faster than a message takes
LOOK_S = 0.2  # for peers that come back, while experts are missing
UNKNOWN_LOAD_S = 0.01  # of an expert from a file, until one was read


@dataclass(frozen=True)
class SiteParts:
    """Parts of the process that the dispatcher works with.

    Attributes:
        epochs: placements that are prepared or in force here.
        gates: gates by decoder layer.
        peers: the other sites.
        files: experts on this machine's disk; None: they cannot be read while serving.
        substitution_of: describes how a layer is degraded.
        activations: counts this site's choices.
    """

    epochs: Epochs
    gates: Mapping[int, Gate]
    peers: Peers
    files: FileCache | None
    substitution_of: SubstitutionOf
    activations: ActivationMeter


@dataclass(frozen=True)
class _Sent:
    """Rows that a peer is asked to compute: their indices, their experts, and the answer to come."""

    rows: Tensor
    experts: list[int]
    num_choices: int
    answer: "asyncio.Task[Frame | MoesaicError]"


class CollaborativeDispatcher:
    """A ``Dispatcher`` of one site; lives on the engine thread's event loop."""

    def __init__(
        self,
        parts: SiteParts,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        wire: WireDtype = "own",
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            parts: parts of this process.
            config: configuration of the model.
            dtype: dtype of rows.
            wire: form in which rows and sums travel, unless ``deterministic``.
            deterministic: sums have the bits of ``local``, wherever experts are.
        """
        self._parts, self._config, self._deterministic = parts, config, deterministic
        self._wire: WireDtype = "own" if deterministic else wire
        self._row_bytes = 2 * row_bytes(config.hidden_size, dtype, self._wire)
        self._view = SiteView.alone(config.moe_layers, config.moe.num_experts)
        self._substitutions: dict[
            tuple[int, frozenset[int] | None], dict[int, LayerSubstitution]
        ] = {}
        self._beside = ThreadPoolExecutor(1, "beside")

    @property
    def view(self) -> SiteView:
        """The placement that steps which begin now would use."""
        self.follow()
        return self._view

    def follow(self) -> None:
        """Take the placement in force; steps do so by themselves, but without any the one before would stay."""
        epochs = self._parts.epochs
        if epochs.in_force != self._view.epoch:
            self._view = SiteView.of(epochs.ask(epochs.in_force))
            self._substitutions.clear()
            self._parts.peers.follow(self._view)
            self._forget_slotted()

    @property
    def waiting_for(self) -> list[str]:
        """See ``Dispatcher.waiting_for``."""
        view = self.view
        if self._parts.files is not None:
            return []
        if not view.epoch:
            return ["a placement from the scheduler"]
        if not self._lost(view) or self._may_lack(view):
            return []
        linked = self._parts.peers.linked_to(view)
        away = [each.worker_id for idx, each in view.peers.items() if idx not in linked]
        return [f"other sites with experts that are not here: {', '.join(away)}"]

    def begin_step(self) -> Step:
        """See ``Dispatcher.begin_step``; with files it always succeeds."""
        if waits := self.waiting_for:
            raise NotReady(f"waiting for {'; '.join(waits)}", code="expert_unavailable")
        view = self.view
        if view.epoch:
            self._parts.epochs.ask(view.epoch)
        self._parts.peers.pin(view)
        substitution = view.substitution if view.substitution != Substitution() else None
        has_lost = self._parts.files is None and bool(self._lost(view))
        return SiteStep(os.urandom(16), view.epoch, substitution, has_lost, view=view)

    def end_step(self, step: Step) -> None:
        """See ``Dispatcher.end_step``."""
        assert isinstance(step, SiteStep)
        self._parts.peers.unpin(step.view)

    async def reachable(self) -> None:
        """See ``Dispatcher.reachable``."""
        while self.waiting_for:
            await self._parts.peers.linked(LOOK_S)

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        await self._parts.peers.close()
        self._beside.shutdown(wait=False)

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        """See ``Dispatcher.dispatch``."""
        hidden = hidden_states
        assert isinstance(step, SiteStep)
        view = step.view
        started = time.monotonic()
        weights, ids = self._parts.gates[layer](hidden)
        self._parts.activations.record(step.epoch, layer, ids, None, "static")
        if promised is not None:
            split_choices(ids, weights, promised, self._layer_substitution(step, view, layer))
        batch = LayerBatch(hidden, weights, ids, unsummed=self._deterministic)
        await self._compute(step, view, layer, batch)
        total = batch.total(layer)
        metrics.LAYERS_S.inc(time.monotonic() - started)
        return total.to(hidden.device, hidden.dtype)

    async def _compute(self, step: Step, view: SiteView, layer: int, batch: LayerBatch) -> None:
        """Have every choice computed, by sources that are tried until none is left."""
        ids = batch.ids.numpy()
        if self._parts.files is not None:
            self._parts.files.note(layer, ids)
        slot_ids = _slots_of(view.slot_of[layer], batch.ids)
        elsewhere = ids[(ids >= 0) & (slot_ids.numpy() < 0)]
        series(metrics.CHOICES, "local").inc(int((ids >= 0).sum()) - elsewhere.size)
        wanted = _counted(elsewhere)
        failed: set[int] = set()
        cached, sources = self._sources(view, layer, wanted, failed)
        asking = self._begin_asking(step, view, layer, batch, sources)
        try:
            if (slot_ids >= 0).any():
                await self._compute_here(layer, view, batch, slot_ids, beside=bool(asking))
            began = time.monotonic()
            while wanted:
                read = sources.get(FILES, [])
                left = await self._by_files(view, layer, batch, cached, read, wanted, failed)
                left += await self._settle(batch, asking, failed)
                wanted = {expert: wanted[expert] for expert in left}
                cached, sources = self._sources(view, layer, wanted, failed)
                asking = self._begin_asking(step, view, layer, batch, sources)
            if elsewhere.size:
                metrics.AWAY_S.inc(time.monotonic() - began)
        finally:
            for sent in asking.values():
                sent.answer.cancel()

    async def _compute_here(
        self, layer: int, view: SiteView, batch: LayerBatch, slot_ids: Tensor, *, beside: bool
    ) -> None:
        """Compute what has a slot; of many rows ``beside`` the event loop, which has messages to move."""
        if not beside:
            batch.compute(layer, view.table, slot_ids)
        elif len(slot_ids) < BESIDE_ROWS or batch.hidden.is_cuda:
            # Rows leave first
            await asyncio.sleep(0)
            batch.compute(layer, view.table, slot_ids)
        else:
            computing = partial(_in_inference, batch.compute, layer, view.table, slot_ids)
            await asyncio.get_running_loop().run_in_executor(self._beside, computing)

    def _sources(
        self, view: SiteView, layer: int, wanted: Mapping[int, int], failed: set[int]
    ) -> tuple[list[int], dict[int, list[int]]]:
        """Choose who computes experts that are in no slot.

        Args:
            view: view of the step.
            layer: the decoder layer.
            wanted: choices of each expert.
            failed: sources that are out of the question.

        Returns:
            Experts that are in memory, and the others by source.

        Raises:
            ExpertUnavailable: nobody can compute some of them.
        """
        if not wanted:
            return [], {}
        files = None if FILES in failed else self._parts.files
        cached = (
            [] if files is None else [e for e in wanted if (layer, view.weights_id(e)) in files]
        )
        rows_of = {expert: rows for expert, rows in wanted.items() if expert not in cached}
        live = self._parts.peers.live(view) if rows_of else {}
        live = {idx: profile for idx, profile in live.items() if idx not in failed}
        holders = {expert: view.holders[layer][expert] for expert in rows_of}
        cost = None if files is None else FileCost(files.load_s or UNKNOWN_LOAD_S)
        sources = choose_sources(rows_of, holders, live, cost, self._row_bytes)
        if missing := rows_of.keys() - {e for found in sources.values() for e in found}:
            raise ExpertUnavailable(layer, len(missing), "no site that holds them answers")
        return cached, sources

    def _begin_asking(
        self,
        step: Step,
        view: SiteView,
        layer: int,
        batch: LayerBatch,
        sources: Mapping[int, list[int]],
    ) -> dict[int, _Sent]:
        """Send each peer its rows."""
        asking = {}
        for peer, experts in sources.items():
            if peer == FILES:
                continue
            rows, hidden, weights, ids = batch.for_peer(experts)
            wire_rows = to_wire(hidden, self._wire).contiguous()
            ask = PeerAsk(peer, wire_rows, weights, ids, self._row_bytes, self._deterministic)
            answer = asyncio.ensure_future(self._parts.peers.ask(step, view, layer, ask))
            asking[peer] = _Sent(rows, experts, int((ids >= 0).sum()), answer)
        return asking

    async def _settle(
        self, batch: LayerBatch, asking: Mapping[int, _Sent], failed: set[int]
    ) -> list[int]:
        """Take the answers, in the order of peers.

        Args:
            batch: takes their results.
            asking: from ``_begin_asking``.
            failed: takes the peers that did not answer.

        Returns:
            The experts of those peers.
        """
        left: list[int] = []
        for peer, sent in sorted(asking.items()):
            outcome = await sent.answer
            if isinstance(outcome, MoesaicError):
                failed.add(peer)
                left += sent.experts
                continue
            series(metrics.CHOICES, "remote").inc(sent.num_choices)
            if batch.unsummed:
                batch.place(sent.rows, *outcome.tensors)
            else:
                batch.add(sent.rows, from_wire(outcome.tensors[0]))
        return left

    async def _by_files(
        self,
        view: SiteView,
        layer: int,
        batch: LayerBatch,
        cached: list[int],
        read: list[int],
        wanted: Mapping[int, int],
        failed: set[int],
    ) -> list[int]:
        """Compute the choices of experts that are ``cached``, and of those to ``read``, few at a time.

        Returns:
            Experts that cannot be read; then ``failed`` has ``FILES`` as well.
        """
        files, experts = self._parts.files, [*cached, *read]
        if files is None:
            return []
        for at in range(0, len(experts), AT_ONCE):
            some = experts[at : at + AT_ONCE]
            weights_ids = [view.weights_id(expert) for expert in some]
            try:
                loaded = await files.get(layer, weights_ids)
            except CheckpointError as error:
                log.error("site.file_unreadable", layer=layer, cause=str(error))
                failed.add(FILES)
                return experts[at:]
            batch.compute_loaded(layer, some, LayerSlots.of(weights_ids, loaded))
            # Before the next ones come.
            del loaded
        series(metrics.CHOICES, "cached").inc(sum(wanted[expert] for expert in cached))
        series(metrics.CHOICES, "loaded").inc(sum(wanted[expert] for expert in read))
        return []

    def _forget_slotted(self) -> None:
        """Drop from memory what has come into a slot."""
        files = self._parts.files
        if files is not None:
            files.drop(
                [
                    (layer, expert)
                    for layer, slots in self._view.table.layers.items()
                    for expert in slots.experts
                ]
            )

    def _lost(self, view: SiteView) -> Mapping[int, Tensor]:
        return view.lost(self._parts.peers.linked_to(view))

    def _may_lack(self, view: SiteView) -> bool:
        """True if rows may do without experts."""
        return view.substitution.instead == "fewer"

    def _layer_substitution(self, step: Step, view: SiteView, layer: int) -> LayerSubstitution:
        """The way to degrade choices of a layer, as the other sites can be reached now.

        Only a step that began with experts lost has rows which may all do without them. In any other one a loss is
        an error, and the step is tried again.
        """
        linked = self._parts.peers.linked_to(view) if step.has_lost else None
        found = self._substitutions.get((view.epoch, linked))
        if found is None:
            lost = {} if linked is None else view.lost(linked)
            found = {
                each: self._parts.substitution_of(each, view.substitution, lost.get(each), None)
                for each in view.slot_of
            }
            self._substitutions = {(view.epoch, linked): found}
        return found[layer]


def _slots_of(slot_of: Tensor, ids: Tensor) -> Tensor:
    """The slot of each choice, int32 ``[T, k]``; -1 for nobody's choices and those elsewhere."""
    slots = slot_of[ids.clamp(min=0).long()]
    return torch.where(ids >= 0, slots, -1)


def _counted(ids: NDArray[np.int32]) -> dict[int, int]:
    """Count the choices of each expert."""
    experts, rows = np.unique(ids, return_counts=True)
    return dict(zip(experts.tolist(), rows.tolist(), strict=True))


def _in_inference(compute: Callable[..., None], *arguments: object) -> None:
    """Compute on another thread than the engine's, which has torch's inference mode to itself."""
    with torch.inference_mode():
        compute(*arguments)
