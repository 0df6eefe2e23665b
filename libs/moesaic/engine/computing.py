"""Computing of planned steps and slices: their rows pass the decoder, and their sequences move on."""

import time
from collections.abc import Awaitable, Callable

from torch import Tensor

from moesaic.brownout.control.contract import EXACT
from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.tracing import StepTracer
from moesaic.engine.progress import Progress
from moesaic.engine.promises import ChoiceCounts, Promising
from moesaic.engine.sequences.requests import Event
from moesaic.engine.sequences.sequence import AnySequence, Chunk
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.step_parts import split_evenly
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.engine.steps.sweep_rows import Sweep
from moesaic.engine.steps.sweeps import Slice
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.sweep_area import SweepArea
from moesaic.prefix.block_hashes import BLOCK_SIZE


class StepComputer:
    """Computes the steps of one batcher on one decoder, through one dispatcher."""

    def __init__(
        self,
        batcher: Batcher,
        decoder: Decoder,
        dispatcher: Dispatcher,
        shortcut: Callable[[KVCache], Shortcut | None] = lambda cache: None,
    ) -> None:
        """Allocate the KV cache and the area of sweeps; see ``Engine``."""
        self._batcher, self._decoder, self._dispatcher = batcher, decoder, dispatcher
        self._cache = decoder.new_kv_cache(batcher.pool.num_blocks, BLOCK_SIZE)
        self._shortcut = shortcut(self._cache)
        self._area = SweepArea(decoder, batcher.limits.sweep_blocks, BLOCK_SIZE)
        self._progress = Progress(batcher)
        self._promising = Promising(decoder.config, decoder.device)
        self._layers_begun = 0
        self.thresholds = EXACT  # of steps that begin now
        self.tracer: StepTracer | None = None  # watches every step while it is there

    @property
    def layers_done(self) -> int:
        """A count that grows while a step goes on, as any thread may ask."""
        return self._layers_begun + (self._shortcut.layers_done if self._shortcut else 0)

    def take_counts(self) -> ChoiceCounts:
        """Take the counts of choices since the last call."""
        return self._promising.take_counts()

    async def compute(self, step: Step, planned: PlannedStep | Slice, events: list[Event]) -> None:
        """Compute what is planned, and add what there is to tell to ``events``.

        Raises:
            MoesaicError: the step counts for nothing, and may be run again.
        """
        if isinstance(planned, Slice):
            await self._compute_slice(step, planned, events)
        else:
            await self._compute_step(step, planned, events)

    async def _compute_step(self, step: Step, planned: PlannedStep, events: list[Event]) -> None:
        self._cache.copy_blocks(planned.copies)
        logits: Tensor | None = None
        if self._shortcut is not None and self.tracer is None:
            num_rows = sum(len(chunk.token_ids) for chunk in planned.chunks)
            parts = split_evenly(planned.chunks, self._shortcut.num_parts(num_rows))
            batches = [self._to_batch(step, part) for part in parts]
            logits = await self._shortcut.forward(step, batches)
        if logits is None:  # what rows were promised so far counts for nothing
            batches = [self._to_batch(step, planned.chunks)]
            logits = await self._forward(batches[0], self._moe_of(step, batches[0]))
        self._promising.count(planned.chunks, batches)
        self._progress.advance(planned.chunks, logits, step.epoch, events)

    async def _forward(self, batch: StepBatch, moe: MoELayer) -> Tensor:
        if self.tracer is not None:
            moe = self.tracer.watching(batch.sequence_rows, moe)  # the same rows in every layer
            return await self._decoder.forward(batch, self._cache, moe, every_row=True)
        return await self._decoder.forward(batch, self._cache, moe)

    async def _compute_slice(self, step: Step, piece: Slice, events: list[Event]) -> None:
        started = time.monotonic()
        if piece.chunks:
            batch = self._to_batch(step, piece.chunks, piece.users)
            await self._area.compute(piece.layer, batch, self._moe_of(step, batch))
            self._promising.count_layer(piece.layer, piece.chunks, piece.users, batch)
        self._progress.note_slice(piece, step.epoch)
        if self._batcher.sweeps.advance(piece, time.monotonic() - started):
            self._finish_sweep(piece.sweep, step.epoch, events)
        else:
            self._progress.tell_sweep(piece.sweep, events)

    def _finish_sweep(self, sweep: Sweep, epoch: int, events: list[Event]) -> None:
        """Score its candidates, with as many logits at a time as a step may have."""
        chunks, most = sweep.wanted, self._batcher.limits.max_num_batched_tokens
        while chunks:
            at_once = [chunks.pop(0)]
            wanted = at_once[0].wanted
            while chunks and wanted + chunks[0].wanted <= most:
                wanted += chunks[0].wanted
                at_once.append(chunks.pop(0))
            rows = [row for chunk in at_once for row in _wanted_rows(chunk)]
            self._progress.advance(at_once, self._area.logits(rows), epoch, events)

    def _moe_of(self, step: Step, batch: StepBatch) -> MoELayer:
        def dispatch(layer: int, hidden: Tensor) -> Awaitable[Tensor]:
            self._layers_begun += 1
            promised = batch.promised_in(len(hidden))
            if promised is not None:
                promised.enter(layer)
            return self._dispatcher.dispatch(step, layer, hidden, promised)

        return dispatch

    def _to_batch(
        self, step: Step, chunks: list[Chunk], users: list[tuple[AnySequence, ...]] | None = None
    ) -> StepBatch:
        return StepBatch(
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            positions=[chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))],
            sequence_rows=[len(chunk.token_ids) for chunk in chunks],
            block_tables=[chunk.block_table for chunk in chunks],
            wanted=[chunk.wanted for chunk in chunks],
            promised=self._promising.promise(step, self.thresholds, chunks, users),
        )


def _wanted_rows(chunk: Chunk) -> list[int]:
    """Find the rows of the area whose logits are wanted."""
    end = chunk.start + len(chunk.token_ids)
    return [
        chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(end - chunk.wanted, end)
    ]
