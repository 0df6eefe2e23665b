"""The step loop: plan, run the decoder, sample, tell.

Lives on the engine thread's event loop and owns everything torch. Requests come in through
``submit`` and ``cancel``; events go out through one callback, a step's events together.

An expert worker that is lost does not fail requests at once: nothing of the failed step counts, and
the same rows are run again when the experts can be reached. A request gives up at its own deadline,
or after ``recovery_s`` without progress.

A step may be cut into micro-batches, whose passes run side by side: while one waits for its experts,
another computes its attention. Together they succeed or fail, like the step that they are.

A slice of a sweep is a step too, of one layer: it pins a placement of its own, so a sweep goes on
through changes of the placement.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch

from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.tracing import StepTracer
from moesaic.engine import metrics
from moesaic.engine.batching import Batcher, Plan, Tally
from moesaic.engine.blocks import BLOCK_SIZE
from moesaic.engine.held_tokens import Teller
from moesaic.engine.limits import Limits
from moesaic.engine.micro_batches import run_together, split
from moesaic.engine.outstanding import Outstanding, outstanding_of
from moesaic.engine.progress import Progress
from moesaic.engine.requests import Event, FailureEvent, Request, RequestKey
from moesaic.engine.sequences import Chunk, Work
from moesaic.engine.sweep_rows import Sweep
from moesaic.engine.sweeps import Slice
from moesaic.errors import DeadlineExceeded, ExpertUnavailable, MoesaicError, NotReady, Overloaded
from moesaic.models.decoder import Decoder, MoELayer
from moesaic.models.flops import flops_of
from moesaic.models.kv_cache import KVCache
from moesaic.models.step_batch import StepBatch
from moesaic.models.sweep_area import SweepArea
from moesaic.prefix.block_hashes import BlockHasher

log = structlog.get_logger()

TellBlocks = Callable[[list[bytes], list[bytes]], None]  # names stored, names evicted

STALL_POLL_S = (
    0.05  # how often deadlines and cancellations are looked at while experts cannot be reached
)

OBSERVE_EVERY_S = 0.05  # a step of one row would spend a hundredth of its time on gauges
LONG_STEP_ROWS = 256  # it may take longer than tokens may be held


class Shortcut(Protocol):
    """Computes steps in fewer calls, for a decoder whose experts are all in this process."""

    @property
    def layers_done(self) -> int:
        """How many layers it has computed so far, as any thread may ask."""
        ...

    def takes(self, batch: StepBatch) -> bool:
        """Whether it can compute this one."""
        ...

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See ``Decoder.forward``."""
        ...


@dataclass(frozen=True)
class Load:
    """What an engine has to do, for routing and for operators."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    epoch: int
    waiting_for: tuple[str, ...]
    outstanding: Mapping[int, Outstanding] = field(default_factory=dict)  # by stream


class Engine:
    """Runs requests on one decoder through one dispatcher."""

    def __init__(
        self,
        decoder: Decoder,
        dispatcher: Dispatcher,
        limits: Limits,
        num_blocks: int,
        emit: Callable[[list[Event]], None],
        recovery_s: float,
        hasher: BlockHasher | None = None,
        tell_blocks: TellBlocks = lambda stored, evicted: None,
        micro_batches: int = 1,
        shortcut: Callable[[KVCache], Shortcut | None] = lambda cache: None,
        step_target_s: float = 0.0,
    ) -> None:
        """``hasher`` turns the prefix cache on; ``tell_blocks`` is then called with what changed in
        it, before the events of the same step are told. Steps are cut into up to ``micro_batches``,
        if the dispatcher can have several batches of a step under way. ``shortcut`` may make,
        of the engine's cache, what computes steps without asking the dispatcher. Steps get so many
        rows that they take about ``step_target_s``; with 0 they get as many as the limits allow."""
        self._decoder, self._dispatcher = decoder, dispatcher
        self._cache = decoder.new_kv_cache(num_blocks, BLOCK_SIZE)
        self._shortcut = shortcut(self._cache)
        self._area = SweepArea(decoder, limits.sweep_blocks, BLOCK_SIZE)
        config = decoder.config
        self._flops = flops_of(config)
        self.batcher = Batcher(
            *(limits, num_blocks, hasher, config.num_layers, self._flops, step_target_s)
        )
        self._progress = Progress(self.batcher)
        self._teller = Teller(emit)
        self._tell_blocks, self._recovery_s = tell_blocks, recovery_s
        self._micro_batches = micro_batches
        self._work_came = asyncio.Event()
        self._tracer: StepTracer | None = None
        self._epoch, self._observed_s = 0, 0.0
        metrics.BLOCKS.set(num_blocks)
        self._layers_begun = 0

    def submit(self, request: Request) -> None:
        """Take a request; what is wrong with it comes back as its one event."""
        try:
            displaced = self.batcher.submit(request)
        except MoesaicError as error:
            self._teller.tell([FailureEvent(request.key, error)])
        else:
            gone = Overloaded("the queue is full, and others that had less went before")
            self._teller.tell([FailureEvent(work.request.key, gone) for work in displaced])
        self._work_came.set()

    def cancel(self, key: RequestKey) -> None:
        """Forget a request; no event of it follows. Unknown keys are ignored."""
        self.batcher.cancel(key)
        self._teller.forget(key)

    def trace(self, tracer: StepTracer | None) -> None:
        """Have every step watched from now on, or none any more."""
        self._tracer = tracer

    @property
    def max_request_tokens(self) -> int:
        """Tokens that one request may have, prompt and answer together."""
        return min(self.batcher.limits.max_model_len, self.batcher.pool.num_blocks * BLOCK_SIZE)

    @property
    def layers_done(self) -> int:
        """A count that grows while a step goes on, as any thread may ask."""
        return self._layers_begun + (self._shortcut.layers_done if self._shortcut else 0)

    def load(self) -> Load:
        """What there is to do now."""
        pool = self.batcher.pool
        return Load(
            num_running=self.batcher.num_running,
            num_waiting=self.batcher.num_waiting,
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            epoch=self._epoch,
            waiting_for=tuple(self._dispatcher.waiting_for),
            outstanding=outstanding_of(self.batcher.everything(), self._flops),
        )

    async def run(self) -> None:
        """Run steps until cancelled. A step that fails for a reason of its own fails its requests,
        not the loop."""
        while True:
            self._expire()
            idle = not self.batcher.everything()
            if idle or time.monotonic() >= self._observed_s + OBSERVE_EVERY_S:
                self._observe()
            if idle:
                self._work_came.clear()
                await self._work_came.wait()
                self._observed_s = 0.0
                continue
            try:
                step = self._dispatcher.begin_step()
            except NotReady as error:
                await self._stall(error)
                continue
            work = self.batcher.next_step()
            if isinstance(work, Slice) or work.chunks:
                await self._run_step(step, work)
            self._dispatcher.end_step(step)
            await asyncio.sleep(0)  # let submissions and cancellations in

    async def _run_step(self, step: Step, work: Plan | Slice) -> None:
        started = time.monotonic()
        events: list[Event] = []
        num_rows = sum(len(chunk.token_ids) for chunk in work.chunks)
        if num_rows >= LONG_STEP_ROWS:
            self._teller.tell_held()
            self._observe()
        try:
            await (
                self._compute_slice(step, work, events)
                if isinstance(work, Slice)
                else self._compute_plan(step, work, events)
            )
        except MoesaicError as error:
            metrics.STEP_RETRIES.inc()
            if isinstance(work, Plan):
                self.batcher.pace.failed(work.prompt_rows, num_rows - work.prompt_rows)
            await self._stall(error)
            return
        except Exception:
            log.exception("step.failed", rows=num_rows)
            self._tell(events)  # of those that had moved on already
            self._fail(work.owners, MoesaicError("the step failed; see the worker's log"))
            return
        took_s = time.monotonic() - started
        if isinstance(work, Slice):
            metrics.SLICE_SECONDS.observe(took_s)
        else:
            metrics.STEP_SECONDS.observe(took_s)
            metrics.STEP_ROWS.observe(num_rows)
            metrics.LIGHT_STEPS.inc(work.is_light)
            self.batcher.took(work, took_s)
        self._epoch = step.epoch
        self._tell(events)

    def _tell(self, events: list[Event]) -> None:
        """Tell a step's events, and first what they leave in the cache."""
        stored, evicted = self.batcher.pool.take_changes()
        if stored or evicted:
            self._tell_blocks(stored, evicted)
        self._teller.tell(events)

    async def _compute_plan(self, step: Step, plan: Plan, events: list[Event]) -> None:
        self._cache.copy_blocks(plan.copies)
        parts = split(plan.chunks, self._micro_batches)
        metrics.MICRO_BATCHES.inc(len(parts))
        if len(parts) == 1:
            logits = await self._forward(_to_batch(plan.chunks), self._moe_of(step))
        else:
            batches = [_to_batch(part) for part in parts]
            logits = torch.cat(await run_together(self._forward, batches, self._moe_of(step)))
        self._progress.advance(plan.chunks, logits, step.epoch, events)

    async def _forward(self, batch: StepBatch, moe: MoELayer) -> torch.Tensor:
        if self._tracer is not None:
            moe = self._tracer.watching(batch.sequence_rows, moe)  # the same rows in every layer
            return await self._decoder.forward(batch, self._cache, moe, every_row=True)
        if self._shortcut is not None and self._shortcut.takes(batch):
            return self._shortcut.forward(batch)
        return await self._decoder.forward(batch, self._cache, moe)

    async def _compute_slice(self, step: Step, piece: Slice, events: list[Event]) -> None:
        started = time.monotonic()
        if piece.chunks:
            await self._area.compute(piece.layer, _to_batch(piece.chunks), self._moe_of(step))
        self._progress.note_slice(piece, step.epoch)
        if self.batcher.sweeps.advance(piece, time.monotonic() - started):
            self._finish_sweep(piece.sweep, step.epoch, events)
        else:
            self._progress.tell_sweep(piece.sweep, events)

    def _finish_sweep(self, sweep: Sweep, epoch: int, events: list[Event]) -> None:
        """Score its candidates, with as many logits at a time as a step may have."""
        chunks, most = sweep.wanted, self.batcher.limits.max_num_batched_tokens
        while chunks:
            together = [chunks.pop(0)]
            wanted = together[0].wanted
            while chunks and wanted + chunks[0].wanted <= most:
                wanted += chunks[0].wanted
                together.append(chunks.pop(0))
            rows = [row for chunk in together for row in _wanted_rows(chunk)]
            self._progress.advance(together, self._area.logits(rows), epoch, events)

    def _moe_of(self, step: Step) -> MoELayer:
        def dispatch(layer: int, hidden: torch.Tensor) -> Awaitable[torch.Tensor]:
            self._layers_begun += 1
            return self._dispatcher.dispatch(step, layer, hidden)

        return dispatch

    async def _stall(self, error: MoesaicError) -> None:
        """Experts cannot be reached: wait a little, and fail whoever has waited too long."""
        self._teller.tell_held()
        now = time.monotonic()
        work = self.batcher.everything()
        if not error.retryable:
            self._fail(work, error)
            return
        for item in work:
            if item.stalled_since_s is None:
                item.stalled_since_s = now
        expired = [
            w
            for w in work
            if w.stalled_since_s is not None and now - w.stalled_since_s >= self._recovery_s
        ]
        if expired:
            cause = (
                error
                if isinstance(error, ExpertUnavailable)
                else ExpertUnavailable(-1, cause=str(error))
            )
            log.warning("requests.gave_up", count=len(expired), cause=str(error))
            self._fail(expired, cause)
        try:
            async with asyncio.timeout(STALL_POLL_S):
                await self._dispatcher.reachable()
        except TimeoutError:
            return
        await asyncio.sleep(0.01)  # reachable, and yet the step failed: do not spin

    def _expire(self) -> None:
        for work in self.batcher.expired(time.monotonic()):
            self._fail([work], DeadlineExceeded("the request", work.request.budget_ms))

    def _fail(self, work: list[Work], error: MoesaicError) -> None:
        unfinished = set(map(id, self.batcher.everything()))
        failed = {id(w): w for w in work if id(w) in unfinished}
        for item in failed.values():
            self.batcher.finish(item)
        self._teller.tell([FailureEvent(item.request.key, error) for item in failed.values()])

    def _observe(self) -> None:
        self._observed_s = time.monotonic()
        metrics.RUNNING.set(self.batcher.num_running)
        metrics.WAITING.set(self.batcher.num_waiting)
        metrics.SWEEP_BLOCKS_USED.set(self.batcher.sweeps.area.num_used)
        metrics.BLOCKS_USED.set(self.batcher.pool.num_used)
        metrics.BLOCKS_CACHED.set(self.batcher.pool.num_cached)
        tally, self.batcher.tally = self.batcher.tally, Tally()
        metrics.PREEMPTIONS.inc(tally.preemptions)
        metrics.DISPLACED.inc(tally.displaced)
        metrics.ROWS_ALLOWED.set(self.batcher.pace.rows())
        metrics.PREFIX_QUERIES.inc(tally.prefix_queries_tokens)
        metrics.PREFIX_HITS.inc(tally.prefix_hits_tokens)


def _wanted_rows(chunk: Chunk) -> list[int]:
    """Where in the area the rows are whose logits are wanted."""
    end = chunk.start + len(chunk.token_ids)
    return [
        chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(end - chunk.wanted, end)
    ]


def _to_batch(chunks: list[Chunk]) -> StepBatch:
    return StepBatch(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        positions=[chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))],
        sequence_rows=[len(chunk.token_ids) for chunk in chunks],
        block_tables=[chunk.block_table for chunk in chunks],
        wanted=[chunk.wanted for chunk in chunks],
    )
