"""The step loop of an engine: plan, compute, advance, tell.

Lives on the engine thread's event loop and owns everything torch. Requests come in through
``submit`` and ``cancel``; events go out through one callback, a step's events together.

An expert worker that is lost does not fail requests at once: nothing of the failed step counts, and
the same rows run again when the experts can be reached. A request gives up at its own deadline, or
after ``recovery_s`` without progress. A slice of a sweep is a step too, of one layer: it pins a
placement of its own, so that a sweep goes on through changes of the placement.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import clear_frames

import structlog
from msgspec.structs import replace

from moesaic.costs import RandomChoice
from moesaic.dispatch.contract import Dispatcher, Step
from moesaic.dispatch.expert_waits import Measuring
from moesaic.dispatch.tracing import StepTracer
from moesaic.engine.brownout import BrownoutControl
from moesaic.engine.computing import Computed, StepComputer
from moesaic.engine.ledger import StepLedger
from moesaic.engine.load import EngineLoad, outstanding_of
from moesaic.engine.metrics import StepMetrics
from moesaic.engine.observer import Observer
from moesaic.engine.progress import Progress
from moesaic.engine.sequences.requests import Event, FailureEvent, Request, RequestKey, named
from moesaic.engine.sequences.sequence import AnySequence
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import LONG_STEP_ROWS, PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.engine.teller import Teller
from moesaic.errors import DeadlineExceeded, ExpertUnavailable, MoesaicError, NotReady, Overloaded
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.performance import LoadReport
from moesaic.models.configuration.flops import flops_of
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.prefix.blocks import BLOCK_SIZE, BlockHasher
from moesaic.telemetry.shortage import ran_out_of_memory, short_of_memory

log = structlog.get_logger()

DISPLACED = Overloaded("the queue is full, and others that had less went before")
SMALLER_STEPS = "lower --max-num-batched-tokens, --max-num-seqs or --kv-blocks"
LOST = ExpertUnavailable(-1, cause="united experts stand in, and the request may not be degraded")

TellBlocks = Callable[[list[bytes], list[bytes]], None]  # names stored, names evicted

# While experts cannot be reached, deadlines and cancellations are looked at this often.
STALL_POLL_S = 0.05


class Engine:
    """Runs requests on one decoder through one dispatcher.

    Attributes:
        batcher: plans steps.
        brownout: says at which thresholds they run.
        ledger: notes what steps cost, for reports.
        observers: these two, and the metrics; called in their order.
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
        self._computer = StepComputer(decoder, dispatcher, limits, num_blocks, shortcut)
        self._progress, self._teller = Progress(self.batcher), Teller(emit)
        self.brownout = BrownoutControl()
        self.ledger = StepLedger(RandomChoice(moe.num_experts, moe.top_k))
        self.observers: list[Observer] = [self.brownout, self.ledger, StepMetrics(self.batcher)]
        self._tell_blocks, self._recovery_s = tell_blocks, recovery_s
        self._request_came = asyncio.Event()
        self._epoch = self._num_rows = 0

    def submit(self, request: Request) -> None:
        """Take a request. If it is refused, its one event is the error."""
        came = True
        try:
            self.brownout.admit(request, sweeps=self.batcher.limits.sweeps(request.task))
            displaced = self.batcher.submit(request)
            failures = [FailureEvent(other.request.key, DISPLACED) for other in displaced]
        except MoesaicError as error:
            # Else it could never run here.
            came = isinstance(error, Overloaded)
            failures = [FailureEvent(request.key, error)]
        if came:
            for observer in self.observers:
                observer.came(request)
        self._tell(failures)
        self._request_came.set()

    def cancel(self, key: RequestKey) -> None:
        """Forget a request; no event of it follows. Unknown keys are ignored."""
        self.batcher.cancel(key)
        for observer in self.observers:
            observer.forget(key)
        self._teller.forget(key)

    def set_brownout(self, policy: BrownoutPolicy) -> None:
        """Go by a policy of brownout from the next step on."""
        self.brownout.set_policy(policy)
        # An idle engine looks too, so that operators see the change.
        self._request_came.set()

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
            num_rows=self._num_rows,
        )

    async def run(self) -> None:
        """Run steps until cancelled.

        A step that fails for a reason of its own fails its requests, not the loop.
        """
        while True:
            self._expire()
            if self.batcher.unfinished():
                await self._step()
                # Let submissions and cancellations in.
                await asyncio.sleep(0)
            else:
                await self._rest()

    async def _step(self) -> None:
        """Plan a step, compute it, advance its sequences, tell their events.

        Nothing here refers to its experts when this returns.
        """
        self.brownout.look(self.batcher)
        try:
            step = self._dispatcher.begin_step()
        except NotReady as error:
            await self._stall(error)
            return
        if planned := self._plan(step):
            events: list[Event] = []
            started_s = time.monotonic()
            try:
                computed = await self._compute(step, planned)
                self._progress.advance(planned, computed, events)
            except Exception as error:
                await self._failed(planned, error, events)
            else:
                self._ended(planned, computed, time.monotonic() - started_s)
                self._tell(events)
        elif step.has_lost:
            # All that there is waits for lost experts.
            with self._pause():
                await asyncio.sleep(STALL_POLL_S)
        self._dispatcher.end_step(step)

    def _plan(self, step: Step) -> PlannedStep | Slice | None:
        """Decide the rows of a step. Requests that have waited too long for lost experts fail."""
        thresholds = self._computer.thresholds = self.brownout.thresholds
        self.batcher.only_standard = step.has_lost
        self.batcher.prefill_threshold = 1.0 if step.substitution is None else thresholds.prefill
        planned = self.batcher.schedule()
        if step.has_lost:
            self._give_up([s for s in self.batcher.unfinished() if self.batcher.holds(s)], LOST)
        return planned if isinstance(planned, Slice) or planned.chunks else None

    async def _compute(self, step: Step, planned: PlannedStep | Slice) -> Computed:
        if planned.num_rows >= LONG_STEP_ROWS:
            self._teller.tell_held()
        for observer in self.observers:
            observer.began(planned)
        return await self._computer.compute(step, planned)

    def _ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        self._epoch = computed.epoch
        self._num_rows += planned.num_rows
        if isinstance(planned, PlannedStep):
            self.batcher.took(planned, took_s)
        for observer in self.observers:
            observer.ended(planned, computed, took_s)

    async def _failed(
        self, planned: PlannedStep | Slice, error: Exception, events: list[Event]
    ) -> None:
        """Wait until the step can run again; if it failed for a reason of its own, fail its requests."""
        for observer in self.observers:
            observer.failed(planned, error)
        if isinstance(error, MoesaicError):
            if isinstance(planned, PlannedStep):
                self.batcher.failed(planned)
            await self._stall(error)
            return
        names = named(sequence.request for sequence in planned.sequences)
        log.exception("step.failed", rows=planned.num_rows, **names)
        failure: MoesaicError = MoesaicError("the step failed; see the worker's log")
        if ran_out_of_memory(error):
            # Its tensors are free for the next step, which has fewer rows of prompts.
            clear_frames(error.__traceback__)
            if isinstance(planned, PlannedStep):
                self.batcher.failed(planned)
            failure = short_of_memory(error, f"a step of {planned.num_rows} rows", SMALLER_STEPS)
        # Of sequences that had moved on already.
        self._tell(events)
        self._fail(planned.sequences, failure)

    def _tell(self, events: Sequence[Event]) -> None:
        """Tell events, and before them the changes of the prefix cache."""
        stored, evicted = self.batcher.pool.take_changes()
        if stored or evicted:
            self._tell_blocks(stored, evicted)
        for observer in self.observers:
            observer.told(events)
        self._teller.tell(events)

    async def _rest(self) -> None:
        """Wait for a request, or until brownout has to look again."""
        self.brownout.look(self.batcher, idle=True)
        self._request_came.clear()
        with self._pause(), suppress(TimeoutError):
            async with asyncio.timeout(self.brownout.rest_s):
                await self._request_came.wait()

    async def _stall(self, error: MoesaicError) -> None:
        """Wait a little for experts that cannot be reached; requests that waited too long fail."""
        self._teller.tell_held()
        sequences = self.batcher.unfinished()
        if not error.retryable:
            self._fail(sequences, error)
            return
        self._give_up(sequences, error)
        with self._pause(), suppress(TimeoutError):
            async with asyncio.timeout(STALL_POLL_S):
                await self._dispatcher.reachable()
            # Reachable, and yet the step failed: do not spin.
            await asyncio.sleep(0.01)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Let observers know that no step runs for the length of the block."""
        for observer in self.observers:
            observer.paused()
        yield
        for observer in self.observers:
            observer.resumed()

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
            names = named(sequence.request for sequence in expired)
            log.warning("requests.gave_up", count=len(expired), cause=str(error), **names)
            self._fail(expired, cause)

    def _expire(self) -> None:
        for sequence in self.batcher.expired(time.monotonic()):
            self._fail([sequence], DeadlineExceeded.of_request(sequence.request.budget_ms))

    def _fail(self, sequences: Sequence[AnySequence], error: MoesaicError) -> None:
        unfinished = set(map(id, self.batcher.unfinished()))
        failed = {id(w): w for w in sequences if id(w) in unfinished}
        for item in failed.values():
            self.batcher.finish(item)
        self._tell([FailureEvent(item.request.key, error) for item in failed.values()])
