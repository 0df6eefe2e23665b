"""The serving side of ``routed``: gate, own share of the experts, and the epochs that may ask for
them."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from prometheus_client import Counter, Histogram
from torch import Tensor

from moesaic.dispatch.activations import ActivationMeter
from moesaic.dispatch.loading.experts import Bring, FromCheckpoint, LoadedExpert
from moesaic.dispatch.loading.pace import Pace
from moesaic.dispatch.sharing import Sharing, decision_digest
from moesaic.dispatch.slots import LoadResult, SlotTable, change_table
from moesaic.dispatch.terms import Terms
from moesaic.dispatch.unsummed import UNSUMMED
from moesaic.errors import InvalidInput, NotReady, PlacementInfeasible, StaleEpoch
from moesaic.kernels.linear import Quantization
from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.gate import load_gates
from moesaic.transport.frame import Frame

MAX_SHARINGS = 4096  # kept; one per layer and set of live workers
MAX_PAST_TENURES = 3  # each may hold a copy of what changed since
RETIRE_AFTER_S = (
    10.0  # frames of earlier epochs are answered this long after a commit: longer than any step
)
MAX_RETIRE_AFTER_S = 120.0  # for those who still ask for one: they do not hear of its successor


ACTIVATED = Histogram(
    "moesaic_experts_activated",
    "Distinct experts of a layer that this worker computed for one batch",
    buckets=[0, 1, 2, 4, 8, 16, 32, 64, 128],
)
ROWS = Counter(
    "moesaic_expert_rows", "Rows that came for this worker's experts, those of every layer"
)
MOST_ACTIVATED = Counter(
    "moesaic_experts_activated_max",
    "The same of the worker that had most for that batch, added up over the batches",
)
SCHEDULING_S = Counter(
    "moesaic_expert_scheduling_seconds", "Deciding which worker computes which experts"
)


@dataclass(frozen=True)
class Tenure:
    """One epoch on this worker: its placement, its slots, and what was derived from the two."""

    placement: Placement
    worker_idx: int
    table: SlotTable
    committed_s: float | None = None  # monotonic time of the commit, None while only prepared


class ExpertHost:
    """Answers layer requests for every epoch that is prepared, in force, or just retired.

    Loading may run on any one thread at a time; ``answer`` runs on the engine thread and sees
    tables only whole.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        worker_id: str,
        slots_per_layer: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        max_expert_bytes: int = 0,
    ) -> None:
        """Read the gates; experts come with the first placement.

        With ``max_expert_bytes``, a placement is refused that would need more memory for experts,
        those of the placement before it included.
        """
        self._config, self._worker_id = config, worker_id
        self.slots_per_layer, self.max_expert_bytes = slots_per_layer, max_expert_bytes
        self._device = device
        self.files = FromCheckpoint(checkpoint, config, dtype, device, quantization)
        self.activations = ActivationMeter(config.moe.num_experts)
        self._gates = load_gates(checkpoint, config, dtype, device)
        self._tenures: dict[int, Tenure] = {}
        self._changing = threading.Lock()  # them: loading and commits have threads of their own
        self._asked_s: dict[int, float] = {}  # when a step last asked for an epoch
        self._sharings: dict[tuple[int, int, ExpertScheduling, tuple[int, ...]], Sharing] = {}
        self.epoch = 0  # in force
        self.rows_computed = 0

    def prepare(self, placement: Placement, bring: Bring | None = None) -> LoadResult:
        """Load what ``placement`` wants here. Repeating it changes nothing.

        Args:
            placement: what may be committed next.
            bring: loads an expert; by default from the checkpoint, without rest.

        Raises:
            InvalidInput: it is for another checkpoint, names more slots than there are, or leaves
                this worker out.
            StaleEpoch: a later epoch, or another placement of this one, is in force already.
            PlacementInfeasible: there is too little memory to hold it beside what is in force.
            CheckpointError: an expert could not be read; nothing has changed.
        """
        known = self._tenures.get(placement.epoch)
        is_known = known is not None and known.placement == placement
        if placement.epoch < self.epoch or (placement.epoch == self.epoch and not is_known):
            raise StaleEpoch(placement.epoch, self.epoch)
        if placement.model_digest != self._config.digest:
            raise InvalidInput(
                "placement.model_digest",
                f"is for another checkpoint; this is {self._config.digest}",
            )
        names = [worker.worker_id for worker in placement.workers]
        if self._worker_id not in names:
            raise InvalidInput("placement.workers", f"must name {self._worker_id}")
        idx = names.index(self._worker_id)
        wanted = {layer: placement.slots[i][idx] for i, layer in enumerate(placement.layers)}
        longest = max((len(experts) for experts in wanted.values()), default=0)
        if longest > self.slots_per_layer:
            raise InvalidInput(
                "placement.slots",
                f"has {longest} slots in a layer, there are {self.slots_per_layer}",
            )
        if known is not None and is_known:
            return LoadResult(
                known.table, 0, sum(e != EMPTY_SLOT for s in wanted.values() for e in s)
            )
        self._drop_uncommitted(placement.epoch)
        newest_first = sorted(self._tenures.items(), reverse=True)
        resident = [tenure.table for _, tenure in newest_first]
        self._require_memory(wanted, resident)
        result = change_table(wanted, bring or self.files.bring(Pace()), resident)
        with self._changing:
            self._tenures = {**self._tenures, placement.epoch: Tenure(placement, idx, result.table)}
        return result

    def _drop_uncommitted(self, before: int) -> None:
        """Free what was prepared for earlier epochs: whoever gave out a later one commits that.

        Not what steps ask for: it was committed, and only this worker was not told. (``learn`` tells it of what no step
        has asked for yet.)
        """
        with self._changing:
            self._tenures = {
                e: t
                for e, t in self._tenures.items()
                if e >= before or t.committed_s is not None or e in self._asked_s
            }

    def _require_memory(
        self, wanted: Mapping[int, Sequence[int]], resident: Sequence[SlotTable]
    ) -> None:
        held = {
            (layer, expert)
            for table in resident
            for layer, slots in table.layers.items()
            for expert in slots.experts
        }
        asked = {(layer, e) for layer, experts in wanted.items() for e in experts} - held
        missing = sum(expert != EMPTY_SLOT for _, expert in asked)
        needed = self.resident_bytes + missing * self.files.expert_bytes
        if missing and 0 < self.max_expert_bytes < needed:
            raise PlacementInfeasible(missing, needed - self.max_expert_bytes)

    def held(self, layer: int, expert: int) -> LoadedExpert | None:
        """An expert that is in memory, for whichever epoch; from any thread."""
        for tenure in self._tenures.values():
            slots = tenure.table.layers.get(layer)
            if slots is not None and expert in slots.experts:
                return slots.loaded[slots.experts.index(expert)]
        return None

    def commit(self, epoch: int) -> None:
        """Put a prepared epoch in force, and free what was prepared for later ones: whoever asks for
        this leads, and has committed none of them. Repeating it changes nothing.

        Raises:
            NotReady: the epoch was not prepared here.
            StaleEpoch: a later one is in force.
        """
        with self._changing:
            if epoch < self.epoch:
                raise StaleEpoch(epoch, self.epoch)
            if epoch not in self._tenures:
                raise NotReady(f"epoch {epoch} was not prepared on {self._worker_id}")
            self._put_in_force(epoch)
            # A later one that steps ask for was committed all the same, and only this worker not told.
            self._tenures = {
                e: t for e, t in self._tenures.items() if e <= epoch or e in self._asked_s
            }

    def learn(self, serving: Placement) -> bool:
        """Hear of a placement that was committed. If it was prepared here it is in force here too: steps may ask for it
        before this worker is told to commit it, and the placement after it may be prepared before either.

        What was prepared for later epochs stays: whoever tells need not lead any more.

        Returns:
            Whether it was news.
        """
        with self._changing:
            prepared = self._tenures.get(serving.epoch)
            known = prepared is not None and prepared.placement == serving
            if not known or serving.epoch <= self.epoch:
                return False
            self._put_in_force(serving.epoch)
            return True

    def _put_in_force(self, epoch: int) -> None:
        """Of those before, the last ones stay: steps may still use them, for one placement can follow close on
        another."""
        if epoch > self.epoch:
            committed = replace(self._tenures[epoch], committed_s=time.monotonic())
            others = {e: t for e, t in self._tenures.items() if e != epoch}
            past = sorted(e for e in others if e < epoch)[-MAX_PAST_TENURES:]
            kept = {e: t for e, t in others.items() if e in past or e > epoch}
            self._tenures = {**kept, epoch: committed}
            self.epoch = epoch
            self._sharings = {}

    def abort(self, epoch: int) -> None:
        """Forget an epoch that was prepared and will not be committed; does nothing if it is in
        force or unknown."""
        with self._changing:
            if epoch > self.epoch:
                self._tenures = {e: t for e, t in self._tenures.items() if e != epoch}

    def retire(self) -> None:
        """Free epochs that another has followed so long ago that no step can still ask for them.

        Who does not hear of the successor, as without Redis, goes on asking; so what was asked for
        lately stays too, for ``MAX_RETIRE_AFTER_S`` at most.
        """
        now_s = time.monotonic()
        long_ago_s, very_long_ago_s = now_s - RETIRE_AFTER_S, now_s - MAX_RETIRE_AFTER_S
        with self._changing:
            oldest = max(
                (
                    epoch
                    for epoch, tenure in self._tenures.items()
                    if tenure.committed_s is not None and tenure.committed_s < long_ago_s
                ),
                default=0,
            )
            in_force = self._tenures.get(self.epoch)
            patient = in_force is not None and (in_force.committed_s or now_s) > very_long_ago_s
            self._asked_s = {e: s for e, s in self._asked_s.copy().items() if e in self._tenures}
            self._tenures = {
                e: t
                for e, t in self._tenures.items()
                if e >= oldest or (patient and self._asked_s.get(e, 0.0) > long_ago_s)
            }

    def slots(self) -> dict[int, tuple[int, ...]]:
        """The expert in every slot of the epoch in force, by layer."""
        current = self._tenures.get(self.epoch)
        return {layer: s.experts for layer, s in current.table.layers.items()} if current else {}

    def placement(self, epoch: int) -> Placement | None:
        """The placement of an epoch that is answered."""
        tenure = self._tenures.get(epoch)
        return tenure.placement if tenure else None

    @property
    def resident_bytes(self) -> int:
        """Bytes of distinct expert weights held, over all epochs."""
        layers = (s for t in self._tenures.values() for s in t.table.layers.values())
        mlps = {id(mlp): mlp.nbytes for s in layers for mlp in s.mlps if mlp is not None}
        return sum(mlps.values())

    def answer(self, request: Frame) -> Frame:
        """Compute this worker's share of one layer for one batch; a ``transport`` handler.

        The request's tensors are hidden states ``[T, H]``; then ``Terms``; then, only if the sender
        has gated itself, float32 ``[T, k]`` weights and int32 ``[T, k]`` ids. The reply's first
        tensor is the partial sum ``[T, H]``, with no rows if no expert of the batch is served here;
        the second, if the terms have loads, what each worker of the placement has to do now, int64
        ``[1, N]``. Its digest is that of what was decided about all workers. With the flag ``UNSUMMED`` the
        first two are instead what ``SlotTable.compute_choices`` gives.
        """
        tenure = self._tenures.get(request.epoch)
        if tenure is None:
            raise StaleEpoch(request.epoch, self.epoch)
        self._asked_s[request.epoch] = time.monotonic()
        if request.layer not in self._gates or len(request.tensors) not in (2, 4):
            raise InvalidInput(
                "frame.layer", f"no MoE layer {request.layer} with {len(request.tensors)} tensors"
            )
        hidden = request.tensors[0]
        if hidden.shape[1] != self._config.hidden_size:
            raise InvalidInput(
                "frame.tensors", f"hidden size is {self._config.hidden_size}, got {hidden.shape[1]}"
            )
        topk_weights, topk_ids = self._routing(request)
        started = time.perf_counter()
        terms, sharing = self._sharing(tenure, request)
        seed = request.request_id + request.layer.to_bytes(4, "little", signed=True)
        share = sharing.share(topk_ids, terms.load, seed)
        SCHEDULING_S.inc(time.perf_counter() - started)
        ACTIVATED.observe(share.num_experts)
        ROWS.inc(len(hidden))
        MOST_ACTIVATED.inc(share.most_experts)
        if request.flags & UNSUMMED:
            results, places = tenure.table.compute_choices(
                request.layer, hidden.to(self._device), share.slot_ids
            )
            answer = [results.cpu(), places.cpu()]
        elif share.num_experts:
            partial = tenure.table.compute_slots(
                request.layer, hidden.to(self._device), topk_weights, share.slot_ids
            ).cpu()
            answer = [partial]
        else:
            answer = [hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)]
        if terms.live[0] == tenure.worker_idx:  # one worker of all that see the batch counts it
            self.activations.record(
                request.epoch, request.layer, topk_ids, share.most_experts, terms.scheduling
            )
        self.rows_computed += hidden.shape[0]
        loads = [] if terms.load is None else [torch.from_numpy(share.load)[None]]
        return request.reply(
            digest=decision_digest(
                request.epoch, request.layer, request.threshold, topk_ids, share.served
            ),
            tensors=[*answer, *loads],
        )

    def _routing(self, request: Frame) -> tuple[Tensor, Tensor]:
        """The weights and ids of each row's experts: the sender's own, or this gate's."""
        hidden = request.tensors[0]
        if len(request.tensors) == 2:
            return self._gates[request.layer](hidden.to(self._device))
        topk_weights, topk_ids = request.tensors[2:]
        shape = (hidden.shape[0], self._config.moe.top_k)
        for name, tensor, dtype in (
            ("frame.tensors[2]", topk_weights, torch.float32),
            ("frame.tensors[3]", topk_ids, torch.int32),
        ):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise InvalidInput(name, f"must be {dtype} {list(shape)}")
        num_experts = self._config.moe.num_experts
        if bool(((topk_ids < 0) | (topk_ids >= num_experts)).any()):
            raise InvalidInput("frame.tensors[3]", f"must have experts in 0..{num_experts - 1}")
        return topk_weights.to(self._device), topk_ids.to(self._device)

    def _sharing(self, tenure: Tenure, request: Frame) -> tuple[Terms, Sharing]:
        """What the request says about sharing, and what was derived from that before: all but the
        loads is the same for many batches."""
        placement, layer = tenure.placement, request.layer
        terms = Terms.decode(request.tensors[1], len(placement.workers))
        key = placement.epoch, layer, terms.scheduling, terms.live
        found = self._sharings.get(key)
        if found is None:
            if len(self._sharings) >= MAX_SHARINGS:
                self._sharings = {}
            found = self._sharings[key] = Sharing(
                placement, layer, tenure.worker_idx, terms.scheduling, terms.live, self._device
            )
        return terms, found
