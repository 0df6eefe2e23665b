"""Brings the experts of a placement into the slots of one worker."""

import gc
from collections.abc import Callable, Sequence
from traceback import clear_frames

from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.experts.epochs import Epochs, Tenure
from moesaic.experts.loaded import Bring, ExpertFiles
from moesaic.experts.pace import LoadPace
from moesaic.experts.preparing.kept import KeptExperts
from moesaic.experts.slots import ExpertKey, LoadResult, change_table, missing_experts
from moesaic.messages.placement import EMPTY_SLOT, Placement
from moesaic.models.weights.on_threads import on_threads
from moesaic.telemetry.shortage import first_line, ran_out_of_memory
from moesaic.transport.device_memory import give_back_unused


class PlacementLoader:
    """Prepares placements, on any one thread at a time.

    Attributes:
        slots_per_layer: most slots that a placement may use here.
        max_expert_bytes: memory for experts of all epochs together; 0: no limit.
        fitted_bytes: bytes of experts that were in memory when the device had no more; 0: it never
            came to that.
        on_loaded: told of each new tenure before it can be in force.
    """

    def __init__(
        self,
        epochs: Epochs,
        files: ExpertFiles,
        model_digest: str,
        worker_id: str,
        slots_per_layer: int,
        max_expert_bytes: int,
        kept: KeptExperts,
    ) -> None:
        """
        Args:
            epochs: epochs of this worker.
            files: the checkpoint's experts.
            model_digest: digest of that checkpoint.
            worker_id: id of this worker.
            slots_per_layer: most slots that a placement may use here.
            max_expert_bytes: memory for experts of all epochs together; 0: no limit.
            kept: experts of preparations that came to nothing.
        """
        self._epochs, self._files = epochs, files
        self._model_digest, self._worker_id = model_digest, worker_id
        self.slots_per_layer, self.max_expert_bytes = slots_per_layer, max_expert_bytes
        self.fitted_bytes, self._kept = 0, kept
        self.on_loaded: Callable[[Tenure], None] = lambda tenure: None

    def prepare(
        self, placement: Placement, bring: Bring | None = None, num_threads: int | None = None
    ) -> LoadResult:
        """Load the experts that ``placement`` puts here. Repeating it changes nothing.

        Experts loaded before an error are kept for a while: the next preparation loads the rest. If the
        device has no memory for them, all of them are freed.

        Args:
            placement: it may be committed next.
            bring: loads an expert; by default from the checkpoint, without rest.
            num_threads: number of threads that load; None: as many as compute.

        Raises:
            InvalidInput: it is for another checkpoint, names more slots than there are, or leaves
                this worker out.
            StaleEpoch: a later epoch, or another placement of this one, is in force already.
            PlacementInfeasible: there is too little memory to hold it beside the one in force; by
                ``max_expert_bytes``, or since the device had no more.
            CheckpointError: an expert could not be read; what serves has not changed.
        """
        known = self._epochs.find(placement)
        worker_idx = self._index_in(placement)
        substitution, num_own = placement.substitution, placement.num_own
        held = {layer: placement.slots[i][worker_idx] for i, layer in enumerate(placement.layers)}
        wanted = {
            layer: [substitution.weights_id(e, num_own) for e in held[layer]] for layer in held
        }
        own = [[e for e in experts if e < num_own] for experts in held.values()]
        longest = max(map(len, own), default=0)
        if longest > self.slots_per_layer:
            raise InvalidInput(
                "placement.slots",
                f"has {longest} slots in a layer without united experts; this worker has "
                f"{self.slots_per_layer}",
            )
        if known is not None:
            kept = sum(e != EMPTY_SLOT for experts in wanted.values() for e in experts)
            return LoadResult(known.table, 0, kept)
        before = self._epochs.tables
        self._epochs.drop_uncommitted(placement.epoch)
        resident = self._epochs.tables
        self._kept.take_over(before, resident)
        missing = missing_experts(wanted, resident)
        self._kept.keep_only(missing)
        self._require_memory(missing)
        num_kept = len(self._kept)
        self._bring(missing, bring or self._files.bring(LoadPace()), num_threads)
        result = change_table(wanted, self._kept.take(), resident)
        tenure = Tenure(placement, worker_idx, result.table)
        self.on_loaded(tenure)
        self._epochs.add(tenure)
        return LoadResult(result.table, result.loaded - num_kept, result.kept + num_kept)

    def abort(self, epoch: int) -> None:
        """See ``Epochs.abort``; its experts are kept for a while."""
        before = self._epochs.tables
        self._epochs.abort(epoch)
        self._kept.take_over(before, self._epochs.tables)

    def _bring(self, missing: Sequence[ExpertKey], bring: Bring, num_threads: int | None) -> None:
        """Have all of ``missing`` kept; those that came before one failed stay so."""
        rest = [key for key in missing if key not in self._kept]
        size = self._files.experts.stored_bytes
        try:
            with (
                self._kept.preparing(),
                self._files.progress.expecting(sum(size(*key) for key in rest)),
            ):
                on_threads(lambda key: self._kept.put(key, bring(*key)), rest, num_threads)
        except (RuntimeError, MemoryError, OSError) as error:
            if not ran_out_of_memory(error):
                raise
            raise self._undone(error, missing) from None

    def _undone(self, error: Exception, missing: Sequence[ExpertKey]) -> PlacementInfeasible:
        """Free what was loaded for ``missing``, and make the error that tells what does not fit."""
        device, self.fitted_bytes = self._files.device, self._epochs.resident_bytes
        left = sum(key not in self._kept for key in missing)
        # Frames of the error refer to experts that came.
        clear_frames(error.__traceback__)
        self._kept.keep_only(())
        gc.collect()
        give_back_unused(device)
        return PlacementInfeasible(
            left,
            left * self._files.expert_bytes,
            f"{device} had memory for {self.fitted_bytes} bytes of experts; lower --slots-per-layer, start "
            f"more expert workers, or free its memory ({first_line(error)})",
        )

    def _index_in(self, placement: Placement) -> int:
        if placement.model_digest != self._model_digest:
            raise InvalidInput(
                "placement.model_digest", f"is for another checkpoint; this is {self._model_digest}"
            )
        names = [worker.worker_id for worker in placement.workers]
        if self._worker_id not in names:
            raise InvalidInput("placement.workers", f"must name {self._worker_id}")
        return names.index(self._worker_id)

    def _require_memory(self, missing: Sequence[ExpertKey]) -> None:
        rest = len(missing) - len(self._kept)
        if self._beyond_bytes(rest) > 0:
            # Frames of an error may still refer to experts of an epoch that is gone.
            gc.collect()
            if (beyond_bytes := self._beyond_bytes(rest)) > 0:
                raise PlacementInfeasible(rest, beyond_bytes)

    def _beyond_bytes(self, count: int) -> int:
        """Bytes that ``count`` more experts would take beyond the memory there is; 0 or less: they fit."""
        if not count or not self.max_expert_bytes:
            return 0
        needed = self._epochs.resident_bytes + count * self._files.expert_bytes
        return needed - self.max_expert_bytes
