"""Computing of planned steps and slices: their rows pass the decoder, and logits come out."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from moesaic.brownout.control.contract import EXACT
from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.expert_waits import NOTHING, ExpertWaits, WaitsForExperts
from moesaic.dispatch.tracing import StepTracer
from moesaic.engine.promises import ChoiceCounts, Promises
from moesaic.engine.sequences.sequence import AnySequence, Chunk
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice, Sweep
from moesaic.messages.substitution import Substitution
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.sweep_area import SweepArea
from moesaic.prefix.blocks import BLOCK_SIZE

Wanted = Iterable[tuple[list[Chunk], Tensor]]  # see ``Computed.wanted``


@dataclass(frozen=True)
class Computed:
    """The outcome of a step that has succeeded.

    Attributes:
        epoch: of the placement under which it ran.
        substitution: by which choices of its rows were degraded.
        counts: of these choices.
        waits: for experts in other processes.
        took_s: to compute it.
        placed_in: see ``Step.placed_in``.
        wanted: of the wanted rows of some chunks, beside these chunks: float32 logits ``[R, V]``, or
            outputs of the final norm ``[R, H]`` of chunks that pool. Those of a sweep are many, so each
            are made when they are asked for.
    """

    epoch: int
    substitution: Substitution | None
    counts: ChoiceCounts
    waits: ExpertWaits
    took_s: float
    placed_in: str
    wanted: Wanted


class StepComputer:
    """Computes steps on one decoder, through one dispatcher."""

    def __init__(
        self,
        decoder: Decoder,
        dispatcher: Dispatcher,
        limits: EngineLimits,
        num_blocks: int,
        shortcut: Callable[[KVCache], Shortcut | None] = lambda cache: None,
    ) -> None:
        """Allocate the KV cache and the area of sweeps; see ``Engine``."""
        self._decoder, self._dispatcher = decoder, dispatcher
        self._waiting = dispatcher if isinstance(dispatcher, WaitsForExperts) else None
        self._cache = decoder.new_kv_cache(num_blocks, BLOCK_SIZE)
        self._shortcut = shortcut(self._cache)
        self._area = SweepArea(decoder, limits.sweep_blocks, BLOCK_SIZE)
        self._max_rows = limits.max_num_batched_tokens
        self._promises = Promises(decoder.config, decoder.device)
        self._layers_begun = 0
        self.thresholds = EXACT  # of steps that begin now
        self.tracer: StepTracer | None = None  # watches every step while it is there

    @property
    def layers_done(self) -> int:
        """A count that grows while a step goes on, as any thread may ask."""
        return self._layers_begun + (self._shortcut.layers_done if self._shortcut else 0)

    async def compute(self, step: Step, planned: PlannedStep | Slice) -> Computed:
        """Compute what is planned.

        Raises:
            MoesaicError: the step counts for nothing, and may be run again.
        """
        # What is left of a step that failed.
        self._take_waits()
        started_s = time.monotonic()
        if isinstance(planned, Slice):
            counts, wanted = await self._compute_slice(step, planned)
        else:
            counts, wanted = await self._compute_step(step, planned)
        took_s = time.monotonic() - started_s
        waits = self._take_waits()
        return Computed(
            step.epoch, step.substitution, counts, waits, took_s, step.placed_in, wanted
        )

    async def _compute_step(self, step: Step, planned: PlannedStep) -> tuple[ChoiceCounts, Wanted]:
        self._cache.copy_blocks(planned.copies)
        pools = any(chunk.pools for chunk in planned.chunks)
        logits: Tensor | None = None
        # Shortcuts give logits only.
        if self._shortcut is not None and self.tracer is None and not pools:
            parts = split_evenly(planned.chunks, self._shortcut.num_parts(planned.num_rows))
            batches = [self._to_batch(step, part) for part in parts]
            logits = await self._shortcut.forward(step, batches)
        # What rows were promised so far counts for nothing.
        wanted: Wanted = [(planned.chunks, logits)] if logits is not None else ()
        if logits is None:
            batches = [self._to_batch(step, planned.chunks)]
            hidden = await self._forward(batches[0], self._moe_of(step, batches[0]))
            wanted = list(self._read(planned.chunks, hidden))
        return self._promises.count(planned.chunks, batches), wanted

    def _read(self, chunks: list[Chunk], hidden: Tensor) -> Iterator[tuple[list[Chunk], Tensor]]:
        """Read the wanted rows of some chunks, ``[R, H]``: logits, then what is pooled."""
        pools = [chunk.pools for chunk in chunks for _ in range(chunk.wanted)]
        for pooled, read in ((False, self._decoder.logits), (True, self._decoder.normed)):
            some = [chunk for chunk in chunks if chunk.pools == pooled]
            if some:
                rows = hidden if len(some) == len(chunks) else hidden[_where(pools, pooled)]
                yield some, read(rows)

    async def _forward(self, batch: StepBatch, moe: MoELayer) -> Tensor:
        if self.tracer is not None:
            # The same rows in every layer.
            moe = self.tracer.watching(batch.sequence_rows, moe)
            return await self._decoder.hidden(batch, self._cache, moe, every_row=True)
        return await self._decoder.hidden(batch, self._cache, moe)

    async def _compute_slice(self, step: Step, piece: Slice) -> tuple[ChoiceCounts, Wanted]:
        counts = ChoiceCounts()
        if piece.chunks:
            batch = self._to_batch(step, piece.chunks, piece.users)
            await self._area.compute(piece.layer, batch, self._moe_of(step, batch))
            counts = self._promises.count_layer(piece.layer, piece.chunks, piece.users, batch)
        is_last = not piece.left and piece.layer == self._decoder.config.num_layers - 1
        return counts, self._wanted_of(piece.sweep) if is_last else ()

    def _wanted_of(self, sweep: Sweep) -> Iterator[tuple[list[Chunk], Tensor]]:
        """Read the wanted rows of a sweep that has passed all layers, as many at a time as a step may have."""
        chunks = sweep.wanted
        while chunks:
            at_once = [chunks.pop(0)]
            wanted = at_once[0].wanted
            while chunks and wanted + chunks[0].wanted <= self._max_rows:
                wanted += chunks[0].wanted
                at_once.append(chunks.pop(0))
            rows = [row for chunk in at_once for row in _wanted_rows(chunk)]
            yield from self._read(at_once, self._area.hidden(rows))

    def _take_waits(self) -> ExpertWaits:
        return NOTHING if self._waiting is None else self._waiting.waits.take()

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
            promised=self._promises.promise(step, self.thresholds, chunks, users),
        )


def _where(pools: list[bool], pooled: bool) -> list[int]:
    return [row for row, told in enumerate(pools) if told == pooled]


def _wanted_rows(chunk: Chunk) -> list[int]:
    """Find the rows of the area whose logits are wanted."""
    end = chunk.start + len(chunk.token_ids)
    return [
        chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(end - chunk.wanted, end)
    ]


def split_evenly(chunks: Sequence[Chunk], count: int) -> list[list[Chunk]]:
    """Cut a step's rows, in order, into ``count`` parts that differ by one row at most.

    Attention of one part overlaps experts of another (JANUS section 6). A chunk may be cut, so the parts
    must pass each layer's attention in their order. There are at least ``count`` rows.
    """
    if count == 1:
        return [list(chunks)]
    total = sum(len(chunk.token_ids) for chunk in chunks)
    assert 1 <= count <= total
    left = deque(chunks)
    parts: list[list[Chunk]] = []
    for part in range(count):
        room = total * (part + 1) // count - total * part // count
        parts.append([])
        while room:
            chunk = left.popleft()
            if len(chunk.token_ids) > room:
                chunk, rest = chunk.split(room)
                left.appendleft(rest)
            parts[-1].append(chunk)
            room -= len(chunk.token_ids)
    return parts
