"""The serving side of ``routed``: gate, own share of the experts, and the epochs that may ask for
them."""

import time
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

from moesaic.dispatch.slots import LoadResult, SlotTable, load_table
from moesaic.errors import ExpertUnavailable, InvalidInput, NotReady, StaleEpoch
from moesaic.kernels.gated_mlp import GatedMLP
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
    ) -> None:
        """Read the gates; experts come with the first placement."""
        self._checkpoint, self._config, self._worker_id = checkpoint, config, worker_id
        self.slots_per_layer = slots_per_layer
        self._dtype, self._device, self._quantization = dtype, device, quantization
        self._gates = load_gates(checkpoint, config, dtype, device)
        self._tenures: dict[int, Tenure] = {}
        self._serving_cache: dict[tuple[int, int, bytes], tuple[Tensor, Tensor]] = {}
        self.epoch = 0  # in force
        self.rows_computed = 0

    def prepare(self, placement: Placement) -> LoadResult:
        """Load what ``placement`` wants here. Repeating it changes nothing.

        Raises:
            InvalidInput: it is for another checkpoint, names more slots than there are, or leaves
                this worker out.
            StaleEpoch: a later epoch, or another placement of this one, is in force already.
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
        current = self._tenures.get(self.epoch)
        result = load_table(
            self._checkpoint,
            self._config,
            wanted,
            self._dtype,
            self._device,
            self._quantization,
            current.table if current else None,
        )
        self._tenures = {**self._tenures, placement.epoch: Tenure(placement, idx, result.table)}
        return result

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
        """Free epochs that another has followed so long ago that no step can still ask for them."""
        long_ago_s = time.monotonic() - RETIRE_AFTER_S
        oldest = max(
            (
                epoch
                for epoch, tenure in self._tenures.items()
                if tenure.committed_s is not None and tenure.committed_s < long_ago_s
            ),
            default=0,
        )
        self._tenures = {e: t for e, t in self._tenures.items() if e >= oldest}

    def slots(self) -> dict[int, tuple[int, ...]]:
        """The expert in every slot of the epoch in force, by layer."""
        current = self._tenures.get(self.epoch)
        return {layer: s.experts for layer, s in current.table.layers.items()} if current else {}

    def find(self, layer: int, expert: int) -> GatedMLP | None:
        """What computes an expert of a layer, if it is here for any epoch; from any thread. Its
        weights are the same in all of them."""
        for tenure in self._tenures.values():
            slots = tenure.table.layers.get(layer)
            if slots is not None and expert in slots.experts:
                return slots.mlps[slots.experts.index(expert)]
        return None

    @property
    def resident_bytes(self) -> int:
        """Bytes of distinct expert weights held, over all epochs."""
        layers = {id(s): s for t in self._tenures.values() for s in t.table.layers.values()}
        return sum(s.nbytes for s in layers.values())

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
