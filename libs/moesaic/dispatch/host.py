"""The serving side of ``routed``: gate, own share of the experts, and the epochs that may ask for
them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from moesaic.dispatch.activations import ActivationMeter, busiest_worker
from moesaic.dispatch.loading.experts import Bring, FromCheckpoint, LoadedExpert
from moesaic.dispatch.loading.pace import Pace
from moesaic.dispatch.slots import LoadResult, SlotTable, change_table
from moesaic.errors import (
    ExpertUnavailable,
    InvalidInput,
    NotReady,
    PlacementInfeasible,
    StaleEpoch,
)
from moesaic.kernels.linear import Quantization
from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import ModelConfig
from moesaic.models.gate import load_gates
from moesaic.placement.assignment import assign_holders
from moesaic.transport.frame import Frame, FrameKind

MAX_CACHED_ASSIGNMENTS = 4096  # one per layer and set of live workers
MAX_PAST_TENURES = 3  # each may hold a copy of what changed since
RETIRE_AFTER_S = (
    10.0  # frames of earlier epochs are answered this long after a commit: longer than any step
)
MAX_RETIRE_AFTER_S = 120.0  # for those who still ask for one: they do not hear of its successor


def assignment_digest(topk_ids: Tensor, serving: Tensor) -> int:
    """64 bits that two workers share only if they chose the same experts and the same holders.

    Args:
        topk_ids: int32 ``[T, k]``.
        serving: int32 ``[E]``, the worker index that serves each expert.
    """
    digest = xxhash.xxh3_64(topk_ids.cpu().contiguous().numpy().tobytes())
    digest.update(serving.numpy().tobytes())
    return digest.intdigest()


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
        self._asked_s: dict[int, float] = {}  # when a step last asked for an epoch
        self._serving_cache: dict[tuple[int, int, bytes], tuple[Tensor, Tensor]] = {}
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
        self._tenures = {**self._tenures, placement.epoch: Tenure(placement, idx, result.table)}
        return result

    def _drop_uncommitted(self, before: int) -> None:
        """Free what was prepared for earlier epochs: whoever gave out a later one commits that.

        Not what steps ask for: it was committed, and only this worker was not told.
        """
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
        """An expert that is in memory, for whichever epoch."""
        for tenure in self._tenures.values():
            slots = tenure.table.layers.get(layer)
            if slots is not None and expert in slots.experts:
                return slots.loaded[slots.experts.index(expert)]
        return None

    def commit(self, epoch: int) -> None:
        """Put a prepared epoch in force. Repeating it changes nothing.

        Raises:
            NotReady: the epoch was not prepared here.
            StaleEpoch: a later one is in force.
        """
        if epoch < self.epoch:
            raise StaleEpoch(epoch, self.epoch)
        if epoch not in self._tenures:
            raise NotReady(f"epoch {epoch} was not prepared on {self._worker_id}")
        if epoch > self.epoch:
            committed = replace(self._tenures[epoch], committed_s=time.monotonic())
            # Steps may still use those before, for one placement can follow close on another.
            others = {e: t for e, t in self._tenures.items() if e != epoch}
            past = sorted(e for e in others if e < epoch)[-MAX_PAST_TENURES:]
            kept = {e: t for e, t in others.items() if e in past or e > epoch}
            self._tenures = {**kept, epoch: committed}
            self.epoch = epoch
            self._serving_cache = {}

    def abort(self, epoch: int) -> None:
        """Forget an epoch that was prepared and will not be committed; does nothing if it is in
        force or unknown."""
        if epoch > self.epoch:
            self._tenures = {e: t for e, t in self._tenures.items() if e != epoch}

    def retire(self) -> None:
        """Free epochs that another has followed so long ago that no step can still ask for them.

        Who does not hear of the successor, as without Redis, goes on asking; so what was asked for
        lately stays too, for ``MAX_RETIRE_AFTER_S`` at most.
        """
        now_s = time.monotonic()
        long_ago_s, very_long_ago_s = now_s - RETIRE_AFTER_S, now_s - MAX_RETIRE_AFTER_S
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

    @property
    def resident_bytes(self) -> int:
        """Bytes of distinct expert weights held, over all epochs."""
        layers = (s for t in self._tenures.values() for s in t.table.layers.values())
        mlps = {id(mlp): mlp.nbytes for s in layers for mlp in s.mlps if mlp is not None}
        return sum(mlps.values())

    async def answer(self, request: Frame) -> Frame:
        """Compute this worker's share of one layer for one batch.

        The request's tensors are hidden states ``[T, H]``; then int32 ``[1, n]``, the live workers'
        indices; then, only if the sender has gated itself, float32 ``[T, k]`` weights and int32
        ``[T, k]`` ids. The reply's tensor is the partial sum ``[T, H]``, its digest that of the
        assignment.
        """
        tenure = self._tenures.get(request.epoch)
        if tenure is None:
            raise StaleEpoch(request.epoch, self.epoch)
        self._asked_s[request.epoch] = time.monotonic()
        if request.layer not in self._gates or len(request.tensors) not in (2, 4):
            raise InvalidInput(
                "frame.layer", f"no MoE layer {request.layer} with {len(request.tensors)} tensors"
            )
        hidden, live = request.tensors[0], request.tensors[1]
        if hidden.shape[1] != self._config.hidden_size:
            raise InvalidInput(
                "frame.tensors", f"hidden size is {self._config.hidden_size}, got {hidden.shape[1]}"
            )
        if len(request.tensors) == 4:
            topk_weights, topk_ids = request.tensors[2], request.tensors[3]
        else:
            topk_weights, topk_ids = self._gates[request.layer](hidden.to(self._device))
        serving, mine = self._serving(tenure, request.layer, live)
        missing = serving[topk_ids.long().cpu()] < 0
        if bool(missing.any()):
            raise ExpertUnavailable(request.layer, len(set(topk_ids.cpu()[missing].tolist())))
        if int(live.min()) == tenure.worker_idx:  # one worker of all that see the batch counts it
            busiest = busiest_worker(topk_ids, serving)
            self.activations.record(request.epoch, request.layer, topk_ids, busiest)
        partial = tenure.table.compute(
            request.layer, hidden.to(self._device), topk_weights, topk_ids, mine
        )
        self.rows_computed += hidden.shape[0]
        return Frame(
            kind=FrameKind.REPLY,
            request_id=request.request_id,
            epoch=request.epoch,
            layer=request.layer,
            seq=request.seq,
            digest=assignment_digest(topk_ids, serving),
            tensors=[partial.cpu()],
        )

    def _serving(self, tenure: Tenure, layer: int, live: Tensor) -> tuple[Tensor, Tensor]:
        key = (tenure.placement.epoch, layer, live.numpy().tobytes())
        found = self._serving_cache.get(key)
        if found is None:
            placement = tenure.placement
            serving = torch.from_numpy(
                assign_holders(
                    placement.holders(layer), len(placement.workers), live.flatten().tolist()
                )
            )
            served = (serving == tenure.worker_idx).tolist()
            mine = tenure.table.slot_of_expert(layer, placement.num_experts, served).to(
                self._device
            )
            if len(self._serving_cache) >= MAX_CACHED_ASSIGNMENTS:
                self._serving_cache = {}
            found = self._serving_cache[key] = (serving, mine)
        return found
