"""Answers layer requests: gates the rows, assigns their experts, computes the own ones.

On a GPU the device is waited for once, before the reply. Then the sums are complete, so UCX may
read them, and so are the copies for the host. These are ``4 * T * k`` bytes of chosen experts, for
the digest and the counts, ``4 * E`` bytes of the worker that serves each, and ``8 * N`` of loads.
More waits are needed if replicas are chosen at random, if no live worker holds an expert, and for
unsummed results.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import torch
from prometheus_client import Counter
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts import frames
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.assignment import Assigner, Assignment, decision_digest
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.brownout.logical import SubstitutionOf
from moesaic.experts.costs import ExpertBatch, ExpertCosts
from moesaic.experts.epochs import Epochs, Tenure
from moesaic.experts.wire_rows import check_rows, from_wire
from moesaic.experts.without_python import AnswersWithoutPython
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.linear import activation_dtype
from moesaic.kernels.promised import LayerSubstitution
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import Gate
from moesaic.telemetry.tallied import TalliedHistogram
from moesaic.transport.device_memory import begin_to_host, settle, to_device
from moesaic.transport.frame import Frame

PARTS = ("receive", "gate", "choose", "compute", "reply")  # of an answer
_BY_NUMBER = attrgetter(*(f"up_to_{n}" for n in (0, 1, 2, 4, 8, 16, 32, 64, 128, "any")))
MOST_NS = (1 << 32) - 1  # that a reply can tell
MAX_DECIDERS = 4096  # kept; one per layer and set of live workers

ACTIVATED = TalliedHistogram(
    "moesaic_experts_activated",
    "Distinct experts of a layer that this worker computed for one batch",
    [0, 1, 2, 4, 8, 16, 32, 64, 128],
)
ROWS = Counter(
    "moesaic_expert_rows", "Rows received for the experts of this worker, over all layers"
)
MOST_ACTIVATED = Counter(
    "moesaic_experts_activated_max",
    "Distinct experts of the busiest worker for one batch, summed over batches",
)
SCHEDULING_S = Counter(
    "moesaic_expert_scheduling_seconds", "Time spent assigning experts to workers"
)
PARTS_S = Counter(
    "moesaic_expert_answer_seconds",
    "Time of the parts of answers without Python: reading a request, gating, assigning "
    "experts, computing, sending the reply",
    ["part"],
)
WITHOUT_PYTHON = Counter(
    "moesaic_expert_answers_without_python", "Answers to requests of a layer that ran no Python"
)

_DeciderKey = tuple[int, int, ExpertScheduling, tuple[int, ...]]  # epoch, layer, policy, live


@dataclass(frozen=True)
class LayerAnswer:
    """An answer, and what there is to count of it."""

    reply: Frame
    topk_ids: Tensor  # int32 [T, k]
    basis: AssignmentBasis
    decider: "_Decider"
    assignment: Assignment
    scheduling_s: float


@dataclass(frozen=True)
class _Decider:
    """Decides about batches of one layer, as all its workers do."""

    assigner: Assigner
    substitution: LayerSubstitution


class LayerAnswers:
    """Answers for every epoch of one worker, on the engine thread."""

    def __init__(
        self,
        epochs: Epochs,
        gates: Mapping[int, Gate],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        activations: ActivationMeter,
        substitution_of: SubstitutionOf,
    ) -> None:
        """Compute beside weights of ``dtype`` with the slots of ``epochs`` on ``device``; ``gates`` are by layer.

        ``substitution_of`` describes how a layer is degraded.
        """
        self._epochs, self._gates, self._config = epochs, gates, config
        self._dtype, self._device = activation_dtype(dtype, device), device
        self._activations = activations
        self._substitution_of = substitution_of
        self._deciders: dict[_DeciderKey, _Decider] = {}
        self._newest = 0  # epoch of the deciders
        self.without_python: AnswersWithoutPython | None = None
        self.costs = ExpertCosts()

    def answer(self, request: Frame) -> Frame:
        """Compute this worker's part of one layer for one batch; a ``transport`` handler.

        Args:
            request: see ``moesaic.experts.frames``.

        Raises:
            StaleEpoch: its epoch is not answered here.
            InvalidInput: it is for no layer with experts, or its tensors have other shapes.
            ExpertUnavailable: no live worker holds an expert that some row wants.
        """
        tenure = self._epochs.ask(request.epoch)
        started = time.perf_counter()
        answered = self.compute(tenure, request)
        seconds = time.perf_counter() - started
        self._note_cost(answered, seconds)
        self._note(tenure, request, answered)
        return replace(answered.reply, took_ns=min(round(1e9 * seconds), MOST_NS))

    def compute(self, tenure: Tenure, request: Frame) -> "LayerAnswer":
        """Compute an answer under ``tenure``. Nothing is counted, and no epoch asked for."""
        hidden = self._rows(request)
        promised = frames.promises_of(request, self._device)
        topk_weights, topk_ids = self._routing(request, hidden, tenure.placement)
        started = time.perf_counter()
        basis = AssignmentBasis.decode(request.tensors[1], len(tenure.placement.workers))
        seed = request.request_id + request.layer.to_bytes(4, "little", signed=True)
        decider = self._decider(tenure, request.layer, basis)
        if promised is not None:
            split_choices(topk_ids, topk_weights, promised, decider.substitution)
        assignment = decider.assigner.assign(topk_ids, basis.load, seed)
        topk_ids = begin_to_host(topk_ids)
        scheduling_s = time.perf_counter() - started
        results = self._compute(tenure, request, hidden, topk_weights, assignment)
        loads = None if basis.load is None else torch.from_numpy(assignment.load)
        decision = decision_digest(
            request.epoch, request.layer, request.threshold, topk_ids, assignment.served
        )
        reply = frames.layer_reply(request, results, loads, decision, promised)
        return LayerAnswer(reply, topk_ids, basis, decider, assignment, scheduling_s)

    def _note_cost(self, answered: "LayerAnswer", seconds: float) -> None:
        """Measure a batch by its own experts; its choices are taken to be spread evenly over all that are active."""
        own, served = answered.assignment.num_experts, answered.assignment.served
        # By choice
        if served.shape == answered.topk_ids.shape:
            choices = int((served == answered.assignment.worker_idx).sum())
        else:
            active = int((served >= 0).sum())
            choices = round(answered.topk_ids.numel() * own / max(1, active))
        if own:
            self.costs.note(ExpertBatch(own, choices, seconds))

    def _note(self, tenure: Tenure, request: Frame, answered: "LayerAnswer") -> None:
        """Count an answer, and have such requests answered without Python if that is possible."""
        basis, assignment = answered.basis, answered.assignment
        SCHEDULING_S.inc(answered.scheduling_s)
        ACTIVATED.observe(assignment.num_experts)
        ROWS.inc(len(answered.topk_ids))
        MOST_ACTIVATED.inc(assignment.most_experts)
        # One worker of all that see the batch.
        counts = basis.live[0] == tenure.worker_idx
        if self.without_python is not None and is_plain(request):
            self._register(self.without_python, tenure, request, answered.decider, counts)
        if counts:
            self._activations.record(
                request.epoch,
                request.layer,
                answered.topk_ids,
                assignment.most_experts,
                basis.scheduling,
            )

    def count(self) -> None:
        """Take over what was counted where no Python ran."""
        if self.without_python is None:
            return
        tally = self.without_python.take_tally()
        if not tally.batches:
            return
        WITHOUT_PYTHON.inc(tally.batches)
        ACTIVATED.add(_BY_NUMBER(tally), tally.experts)
        ROWS.inc(tally.rows)
        MOST_ACTIVATED.inc(tally.most_experts)
        SCHEDULING_S.inc(tally.choose_ns * 1e-9)
        for part in PARTS:
            PARTS_S.labels(part).inc(getattr(tally, f"{part}_ns") * 1e-9)

    def _register(
        self,
        answers: AnswersWithoutPython,
        tenure: Tenure,
        request: Frame,
        decider: _Decider,
        counts: bool,
    ) -> None:
        """Have requests like this one answered without Python from now on, if that is possible."""
        # It comes here again where there is no room for its counts.
        self._activations.take_more()
        epoch, layer = request.epoch, request.layer
        packed, decision = tenure.table.layers[layer].packed, decider.assigner.native
        kernel = (
            self._gates[layer].before(packed, decider.substitution) if packed is not None else None
        )
        if kernel is None or packed is None or decision is None:
            return
        decision |= {"num_slots": len(packed.c), "counts": counts}
        still = partial(self._epochs.answers, epoch)
        answers.register(epoch, layer, request.tensors[1], kernel, decision, still)

    def _rows(self, request: Frame) -> Tensor:
        """The hidden states ``[T, H]`` of a request that can be answered."""
        if request.layer not in self._gates or len(request.tensors) not in (2, 4):
            raise InvalidInput(
                "frame.layer", f"no MoE layer {request.layer} with {len(request.tensors)} tensors"
            )
        rows = request.tensors[0]
        check_rows(rows, self._config.hidden_size)
        return to_device(from_wire(rows), self._device).to(self._dtype)

    def _routing(
        self, request: Frame, hidden: Tensor, placement: Placement
    ) -> tuple[Tensor, Tensor]:
        """The weights and ids of each row's experts: the sender's own, or this gate's."""
        if len(request.tensors) == 2:
            return self._gates[request.layer](hidden)
        topk_weights, topk_ids = request.tensors[2:]
        shape = (hidden.shape[0], self._config.moe.top_k)
        for name, tensor, dtype in (
            ("frame.tensors[2]", topk_weights, torch.float32),
            ("frame.tensors[3]", topk_ids, torch.int32),
        ):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise InvalidInput(name, f"must be {dtype} {list(shape)}")
        # What the sender has split already may have nobody's choices, and those of united experts.
        promised = request.flags & frames.PROMISED
        least, num_experts = (0, placement.num_own) if promised else (-1, placement.num_experts)
        if bool(((topk_ids < least) | (topk_ids >= num_experts)).any()):
            raise InvalidInput(
                "frame.tensors[3]", f"must have experts in {least}..{num_experts - 1}"
            )
        return to_device(topk_weights, self._device), to_device(topk_ids, self._device)

    def _decider(self, tenure: Tenure, layer: int, basis: AssignmentBasis) -> _Decider:
        """The decider for this basis; kept, for only loads differ from batch to batch."""
        placement = tenure.placement
        if self._newest != self._epochs.in_force or len(self._deciders) >= MAX_DECIDERS:
            self._deciders, self._newest = {}, self._epochs.in_force
        key = placement.epoch, layer, basis.scheduling, basis.live
        found = self._deciders.get(key)
        if found is None:
            assigner = Assigner(
                placement, layer, tenure.worker_idx, basis.scheduling, basis.live, self._device
            )
            substitution = self._substitution_of(
                layer, placement.substitution, assigner.lost, assigner.homes
            )
            found = self._deciders[key] = _Decider(assigner, substitution)
        return found

    def _compute(
        self,
        tenure: Tenure,
        request: Frame,
        hidden: Tensor,
        topk_weights: Tensor,
        assignment: Assignment,
    ) -> list[Tensor]:
        """The partial sum, or unsummed results and their places; they are complete.

        So is the assignment from then on.
        """
        layer, slot_ids = request.layer, assignment.slot_ids
        if frames.wants_unsummed(request):
            results, places = tenure.table.compute_choices(layer, hidden, slot_ids)
            return [results.cpu(), places.cpu()]
        # Whether there is anything to compute is known on the host only after the wait, which is
        # worth more than a few kernels that find nothing to do.
        apart = frames.travels_apart(request)
        if not (apart or hidden.is_cuda) and not assignment.num_experts:
            return [frames.partial_sum(request, torch.empty(0, hidden.shape[1]))]
        sums = tenure.table.compute_slots(layer, hidden, topk_weights, slot_ids)
        part = frames.partial_sum(request, sums).contiguous()
        if apart:
            settle(self._device)
        else:
            part = part.cpu()
        return [part if assignment.num_experts else part[:0]]


def is_plain(request: Frame) -> bool:
    """True if a request asks for no more than the partial sum of float32 or packed rows, all in its payload."""
    plain = len(request.tensors) == 2 and request.flags in (0, frames.PROMISED)
    plain = plain and bool(request.body) == bool(request.flags)
    return plain and request.tensors[0].dtype in (torch.float32, torch.int8)
