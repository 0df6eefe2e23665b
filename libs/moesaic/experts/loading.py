"""Brings the experts of a placement into the slots of one worker."""

from collections.abc import Mapping, Sequence

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.experts.epochs import Epochs, Tenure
from moesaic.experts.loaded import Bring, ExpertFiles
from moesaic.experts.pace import LoadPace
from moesaic.experts.slots import LoadResult, SlotTable, change_table
from moesaic.messages.placement import EMPTY_SLOT, Placement


class PlacementLoader:
    """Prepares placements, on any one thread at a time.

    Attributes:
        max_expert_bytes: memory for experts of all epochs together; 0: no limit.
    """

    def __init__(
        self,
        epochs: Epochs,
        files: ExpertFiles,
        model_digest: str,
        worker_id: str,
        slots_per_layer: int,
        max_expert_bytes: int,
    ) -> None:
        """
        Args:
            epochs: of this worker.
            files: the checkpoint's experts.
            model_digest: of that checkpoint.
            worker_id: of this worker.
            slots_per_layer: most slots that a placement may use here.
            max_expert_bytes: memory for experts of all epochs together; 0: no limit.
        """
        self._epochs, self._files = epochs, files
        self._model_digest, self._worker_id = model_digest, worker_id
        self._slots_per_layer, self.max_expert_bytes = slots_per_layer, max_expert_bytes

    def prepare(self, placement: Placement, bring: Bring | None = None) -> LoadResult:
        """Load the experts that ``placement`` puts here. Repeating it changes nothing.

        Args:
            placement: it may be committed next.
            bring: loads an expert; by default from the checkpoint, without rest.

        Raises:
            InvalidInput: it is for another checkpoint, names more slots than there are, or leaves
                this worker out.
            StaleEpoch: a later epoch, or another placement of this one, is in force already.
            PlacementInfeasible: there is too little memory to hold it beside the one in force.
            CheckpointError: an expert could not be read; nothing has changed.
        """
        known = self._epochs.find(placement)
        worker_idx = self._index_in(placement)
        rung, num_own = placement.rung, placement.num_own
        held = {layer: placement.slots[i][worker_idx] for i, layer in enumerate(placement.layers)}
        wanted = {layer: [rung.weights_id(e, num_own) for e in held[layer]] for layer in held}
        own = [[e for e in experts if e < num_own] for experts in held.values()]
        longest = max(map(len, own), default=0)
        if longest > self._slots_per_layer:
            raise InvalidInput(
                "placement.slots",
                f"has {longest} slots in a layer, united experts aside; there are "
                f"{self._slots_per_layer}",
            )
        if known is not None:
            kept = sum(e != EMPTY_SLOT for experts in wanted.values() for e in experts)
            return LoadResult(known.table, 0, kept)
        self._epochs.drop_uncommitted(placement.epoch)
        resident = self._epochs.tables
        self._require_memory(wanted, resident)
        result = change_table(wanted, bring or self._files.bring(LoadPace()), resident)
        self._epochs.add(Tenure(placement, worker_idx, result.table))
        return result

    def _index_in(self, placement: Placement) -> int:
        if placement.model_digest != self._model_digest:
            raise InvalidInput(
                "placement.model_digest", f"is for another checkpoint; this is {self._model_digest}"
            )
        names = [worker.worker_id for worker in placement.workers]
        if self._worker_id not in names:
            raise InvalidInput("placement.workers", f"must name {self._worker_id}")
        return names.index(self._worker_id)

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
        needed = self._epochs.resident_bytes + missing * self._files.expert_bytes
        if missing and 0 < self.max_expert_bytes < needed:
            raise PlacementInfeasible(missing, needed - self.max_expert_bytes)
