"""The step loop of an engine: plan, compute, tell.

Lives on the engine thread's event loop and owns everything torch. Requests come in through
``submit`` and ``cancel``; events go out through one callback, a step's events together.

An expert worker that is lost does not fail requests at once: nothing of the failed step counts, and
the same rows run again when the experts can be reached. A request gives up at its own deadline, or
after ``recovery_s`` without progress. A slice of a sweep is a step too, of one layer: it pins a
placement of its own, so that a sweep goes on through changes of the placement.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from msgspec.structs import replace

from moesaic.costs import RandomChoice
from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.expert_waits import NOTHING, ExpertWaits, Measuring, WaitsForExperts
from moesaic.dispatch.tracing import StepTracer
from moesaic.engine import metrics
from moesaic.engine.brownout import BrownoutControl, BrownoutLoad
from moesaic.engine.computing import StepComputer
from moesaic.engine.held_tokens import Teller
from moesaic.engine.ledger import StepLedger
from moesaic.engine.outstanding import Outstanding, outstanding_of
from moesaic.engine.sequences.requests import Event, FailureEvent, Request, RequestKey
from moesaic.engine.sequences.sequence import AnySequence
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.limits import EngineLimits
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import DeadlineExceeded, ExpertUnavailable, MoesaicError, NotReady, Overloaded
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.performance import LoadReport
from moesaic.models.configuration.flops import flops_of
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.prefix.block_hashes import BLOCK_SIZE, BlockHasher

log = structlog.get_logger()

LOST = ExpertUnavailable(-1, cause="united experts stand in, and the request may not be degraded")

TellBlocks = Callable[[list[bytes], list[bytes]], None]  # names stored, names evicted

# While experts cannot be reached, deadlines and cancellations are looked at this often.
STALL_POLL_S = 0.05
OBSERVE_EVERY_S = 0.05  # a step of one row would spend a hundredth of its time on gauges
LONG_STEP_ROWS = 256  # such a step may take longer than tokens may be held


@dataclass(frozen=True)
class EngineLoad:
    """The work of an engine, as routing and operators see it."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    epoch: int
    waiting_for: tuple[str, ...]
    outstanding: Mapping[int, Outstanding] = field(default_factory=dict)  # by stream
    brownout: BrownoutLoad = field(default_factory=BrownoutLoad)


class Engine:
    """Runs requests on one decoder through one dispatcher.

    Attributes:
        batcher: plans steps.
        brownout: says at which thresholds they run.
        ledger: notes what steps cost, for reports.
    """

    def __init__(
        self,
        decoder: Decoder,
        dispatcher: Dispatcher,
        limits: EngineLimits,
        num_blocks: int,
        emit: Callable[[list[Event]], None],
        recovery_s: float,
        hasher: BlockHasher | None = None,
        tell_blocks: TellBlocks = lambda stored, evicted: None,
        shortcut: Callable[[KVCache], Shortcut | None] = lambda cache: None,
        step_target_s: float = 0.0,
    ) -> None:
        """Set the engine up; ``run`` runs it.

        Args:
            decoder: computes everything but the experts.
            dispatcher: reaches these.
            limits: of what is taken on.
            num_blocks: KV blocks.
            emit: called with the events of a step.
            recovery_s: a request gives up after so long without progress.
            hasher: names blocks for the prefix cache; None: there is none.
            tell_blocks: called with what changed in the prefix cache, before the events of the step.
            shortcut: may make, of the KV cache, a way to compute steps without the dispatcher.
            step_target_s: steps get so many rows that they take about as long; 0: as many as the
                limits allow.
        """
        self._dispatcher, self._flops = dispatcher, flops_of(decoder.config)
        num_layers, moe = decoder.config.num_layers, decoder.config.moe
        self.batcher = Batcher(limits, num_blocks, hasher, num_layers, self._flops, step_target_s)
        self._computer = StepComputer(self.batcher, decoder, dispatcher, shortcut)
        self._teller, self.brownout = Teller(emit), BrownoutControl()
        self.ledger = StepLedger(RandomChoice(moe.num_experts, moe.top_k))
        self._tell_blocks, self._recovery_s = tell_blocks, recovery_s
        self._waiting = dispatcher if isinstance(dispatcher, WaitsForExperts) else None
        self._request_came = asyncio.Event()
        self._epoch, self._observed_s = 0, 0.0
        metrics.BLOCKS.set(num_blocks)

    def submit(self, request: Request) -> None:
        """Take a request; what is wrong with it comes back as its one event."""
        try:
            self.brownout.admit(request, sweeps=self.batcher.limits.sweeps(request.task))
            displaced = self.batcher.submit(request)
        except MoesaicError as error:
            self.brownout.forget(request.key)
            if isinstance(error, Overloaded):
                self.ledger.refused(request)
            self._teller.tell([FailureEvent(request.key, error)])
        else:
            self.ledger.came(request)
            gone = Overloaded("the queue is full, and others that had less went before")
            events = [FailureEvent(sequence.request.key, gone) for sequence in displaced]
            self._note(events)
            self._teller.tell(events)
        self._request_came.set()

    def cancel(self, key: RequestKey) -> None:
        """Forget a request; no event of it follows. Unknown keys are ignored."""
        self.batcher.cancel(key)
        self.brownout.forget(key)
        self.ledger.forget(key)
        self._teller.forget(key)

    def set_brownout(self, policy: BrownoutPolicy) -> None:
        """Go by a policy of brownout from the next step on."""
        self.brownout.set_policy(policy)
        self._request_came.set()  # an idle engine looks too, so that operators see the change

    def trace(self, tracer: StepTracer | None) -> None:
        """Have every step watched from now on, or none any more."""
        self._computer.tracer = tracer

    @property
    def max_request_tokens(self) -> int:
        """Tokens that one request may have, prompt and answer together."""
        return min(self.batcher.limits.max_model_len, self.batcher.pool.num_blocks * BLOCK_SIZE)

    @property
    def layers_done(self) -> int:
        """A count that grows while a step goes on, as any thread may ask."""
        return self._computer.layers_done

    def take_report(self) -> LoadReport:
        """Report the load since the last call."""
        dispatcher = self._dispatcher
        costs = dispatcher.costs if isinstance(dispatcher, Measuring) else None
        return replace(self.ledger.take(costs), waiting=self.batcher.num_waiting)

    def load(self) -> EngineLoad:
        """Describe the work there is now."""
        pool = self.batcher.pool
        return EngineLoad(
            num_running=self.batcher.num_running,
            num_waiting=self.batcher.num_waiting,
            kv_blocks_used=pool.num_used,
            kv_blocks_total=pool.num_blocks,
            epoch=self._epoch,
            waiting_for=tuple(self._dispatcher.waiting_for),
            outstanding=outstanding_of(self.batcher.unfinished(), self._flops),
            brownout=self.brownout.load(),
        )

    async def run(self) -> None:
        """Run steps until cancelled.

        A step that fails for a reason of its own fails its requests, not the loop.
        """
        while True:
            self._expire()
            idle = not self.batcher.unfinished()
            if idle or time.monotonic() >= self._observed_s + OBSERVE_EVERY_S:
                self._observe()
            self.brownout.look(self.batcher, idle=idle)
            if idle:
                self._request_came.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.brownout.rest_s):
                        await self._request_came.wait()
                self.ledger.starts_anew()
                self._observed_s = 0.0
                continue
            await self._take_step()
            await asyncio.sleep(0)  # let submissions and cancellations in

    async def _take_step(self) -> None:
        """Begin a step, run it and end it; nothing here refers to its experts when this returns."""
        try:
            step = self._dispatcher.begin_step()
        except NotReady as error:
            await self._stall(error)
            self.ledger.starts_anew()
            return
        thresholds = self._computer.thresholds = self.brownout.thresholds
        self.batcher.only_standard = step.has_lost
        self.batcher.prefill_threshold = 1.0 if step.rung is None else thresholds.prefill
        planned = self.batcher.next_step()
        if step.has_lost:
            self._give_up([s for s in self.batcher.unfinished() if self.batcher.holds(s)], LOST)
        if isinstance(planned, Slice) or planned.chunks:
            await self._run_step(step, planned)
        elif step.has_lost:  # all that there is waits for lost experts
            await asyncio.sleep(STALL_POLL_S)
            self.ledger.starts_anew()
        self._dispatcher.end_step(step)

    async def _run_step(self, step: Step, planned: PlannedStep | Slice) -> None:
        started = time.monotonic()
        events: list[Event] = []
        num_rows = sum(len(chunk.token_ids) for chunk in planned.chunks)
        if num_rows >= LONG_STEP_ROWS:
            self._teller.tell_held()
            self._observe()
        if isinstance(planned, PlannedStep):
            self.brownout.began(planned)
            work = self.ledger.begins(planned)
        self._take_waits()  # what is left of a step that failed
        try:
            await self._computer.compute(step, planned, events)
            self.brownout.note_degraded(self._computer.take_counts(), step.rung)
        except MoesaicError as error:
            metrics.STEP_RETRIES.inc()
            if isinstance(planned, PlannedStep):
                self.batcher.failed(planned)
            await self._stall(error)
            self.ledger.starts_anew()
            return
        except Exception:
            log.exception("step.failed", rows=num_rows)
            self.ledger.starts_anew()
            self._tell(events)  # of sequences that had moved on already
            self._fail(planned.sequences, MoesaicError("the step failed; see the worker's log"))
            return
        took_s = time.monotonic() - started
        if isinstance(planned, Slice):
            metrics.SLICE_SECONDS.observe(took_s)
            self.ledger.starts_anew()
        else:
            metrics.STEP_SECONDS.observe(took_s)
            metrics.STEP_ROWS.observe(num_rows)
            metrics.LIGHT_STEPS.inc(planned.is_light)
            self.batcher.took(planned, took_s)
            self.brownout.stepped(planned)
            self.ledger.stepped(work, self._take_waits())
        self._epoch = step.epoch
        self._tell(events)

    def _tell(self, events: list[Event]) -> None:
        """Tell a step's events, and before them the changes of the prefix cache."""
        stored, evicted = self.batcher.pool.take_changes()
        if stored or evicted:
            self._tell_blocks(stored, evicted)
        self._note(events)
        self._teller.tell(events)

    def _note(self, events: Sequence[Event]) -> None:
        """Measure the latencies of a step's events."""
        self.brownout.told(events)
        self.ledger.told(events)

    def _take_waits(self) -> ExpertWaits:
        """Take what the dispatcher has waited for since the last call."""
        return NOTHING if self._waiting is None else self._waiting.waits.take()

    async def _stall(self, error: MoesaicError) -> None:
        """Wait a little for experts that cannot be reached; requests that waited too long fail."""
        self._teller.tell_held()
        sequences = self.batcher.unfinished()
        if not error.retryable:
            self._fail(sequences, error)
            return
        self._give_up(sequences, error)
        try:
            async with asyncio.timeout(STALL_POLL_S):
                await self._dispatcher.reachable()
        except TimeoutError:
            return
        await asyncio.sleep(0.01)  # reachable, and yet the step failed: do not spin

    def _give_up(self, sequences: Sequence[AnySequence], error: MoesaicError) -> None:
        """Fail those of the sequences, which cannot go on, that have waited for too long."""
        now_s = time.monotonic()
        expired: list[AnySequence] = []
        for sequence in sequences:
            if sequence.stalled_since_s is None:
                sequence.stalled_since_s = now_s
            if now_s - sequence.stalled_since_s >= self._recovery_s:
                expired.append(sequence)
        if expired:
            known = isinstance(error, ExpertUnavailable)
            cause = error if known else ExpertUnavailable(-1, cause=str(error))
            log.warning("requests.gave_up", count=len(expired), cause=str(error))
            self._fail(expired, cause)

    def _expire(self) -> None:
        for sequence in self.batcher.expired(time.monotonic()):
            self._fail([sequence], DeadlineExceeded.of_request(sequence.request.budget_ms))

    def _fail(self, sequences: Sequence[AnySequence], error: MoesaicError) -> None:
        unfinished = set(map(id, self.batcher.unfinished()))
        failed = {id(w): w for w in sequences if id(w) in unfinished}
        for item in failed.values():
            self.batcher.finish(item)
        events = [FailureEvent(item.request.key, error) for item in failed.values()]
        self._note(events)
        self._teller.tell(events)

    def _observe(self) -> None:
        self._observed_s = time.monotonic()
        metrics.RUNNING.set(self.batcher.num_running)
        metrics.WAITING.set(self.batcher.num_waiting)
        metrics.SWEEP_BLOCKS_USED.set(self.batcher.sweeps.area.num_used)
        metrics.BLOCKS_USED.set(self.batcher.pool.num_used)
        metrics.BLOCKS_CACHED.set(self.batcher.pool.num_cached)
        tally = self.batcher.tally.take()
        metrics.PREEMPTIONS.inc(tally.preemptions)
        metrics.DISPLACED.inc(tally.displaced)
        metrics.ROWS_ALLOWED.set(self.batcher.pace.rows())
        metrics.PREFIX_QUERIES.inc(tally.prefix_queries_tokens)
        metrics.PREFIX_HITS.inc(tally.prefix_hits_tokens)
