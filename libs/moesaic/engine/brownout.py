"""The control of brownout in an engine: measures latencies, and decides before a step is planned.

Lives on the engine's event loop. An engine that has not been told a policy computes everything
exactly, and only measures.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moesaic.brownout.control.contract import (
    EXACT,
    PHASES,
    Phase,
    QueueState,
    StepTaken,
    Thresholds,
)
from moesaic.brownout.control.ladder import Ladder, SparseDecisions
from moesaic.engine import metrics
from moesaic.engine.computing import Computed
from moesaic.engine.observer import Observer
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    PooledEvent,
    Request,
    RequestKey,
    ScoreEvent,
    TokenEvent,
)
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import Overloaded
from moesaic.messages.brownout import BrownoutDecision, BrownoutMode, BrownoutPolicy

DECIDE_EVERY_S = 0.05
REST_S = 0.5  # while an idle engine has something to raise or to tell
CHOICES_KEPT = 0.99  # of the weight of choices, each time some more are counted


@dataclass(frozen=True)
class BrownoutLoad:
    """The state of brownout, as operators see it.

    Attributes:
        mode: of the policy in force here.
        prefill_threshold: share of choices whose own experts stay.
        decode_threshold: likewise.
        ttft_p90_s: of the policy's window; ``None`` without first tokens.
        tpot_p90_s: likewise.
        shedding: new standard requests are refused.
        num_shed: requests refused so far.
        degraded_share: of late choices, those that their own experts did not serve.
    """

    mode: BrownoutMode = "off"
    prefill_threshold: float = 1.0
    decode_threshold: float = 1.0
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None
    shedding: bool = False
    num_shed: int = 0
    degraded_share: float = 0.0


@dataclass
class _Timing:
    """Times of one request; ``began``: so did the first step for its next token."""

    submitted_s: float
    exact: bool
    began: bool = False
    last_token_s: float | None = None


class BrownoutControl(Observer):
    """Decides about thresholds and about shedding, for one engine.

    Attributes:
        clock: gives seconds, and never goes back.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self._ladder, self._sparse = Ladder(BrownoutPolicy()), SparseDecisions()
        self._timings: dict[RequestKey, _Timing] = {}
        self._decided_s = float("-inf")
        self._idle_since_s: float | None = None
        self._iteration_s = 0.0
        self._step_rows = 1
        self._num_shed = 0
        self._choices = self._degraded = 0.0

    @property
    def policy(self) -> BrownoutPolicy:
        """The policy in force."""
        return self._ladder.policy

    def set_policy(self, policy: BrownoutPolicy) -> None:
        """Decide by ``policy`` from the next step on."""
        if policy != self.policy:
            self._ladder.set_policy(policy)
            self._decided_s = float("-inf")

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds in force."""
        return self._ladder.state.thresholds

    @property
    def num_open(self) -> int:
        """Number of requests whose latencies are measured."""
        return len(self._timings)

    @property
    def rest_s(self) -> float | None:
        """Longest time that an idle engine may rest without a look; ``None``: for ever."""
        is_lowered = self.policy.mode == "auto" and self._ladder.state.thresholds != EXACT
        return REST_S if is_lowered or self._sparse.has_more(self._ladder.state) else None

    def admit(self, request: Request, *, sweeps: bool = False) -> None:
        """Let a request join the queue, or refuse it.

        Args:
            request: that has come.
            sweeps: it is only scored and stores no KV: it takes no place in steps, and steps are planned
                around it.

        Raises:
            Overloaded: it is shed, or would wait for too long.
        """
        now_s = self.clock()
        if not sweeps:
            self._ladder.arrivals.add(now_s, len(request.token_ids))
        try:
            self._ladder.admit(exact=request.exact)
        except Overloaded:
            self._num_shed += 1
            metrics.BROWNOUT_SHED.labels("exact" if request.exact else "standard").inc()
            raise
        if not sweeps:
            self._timings[request.key] = _Timing(now_s, request.exact)

    def forget(self, key: RequestKey) -> None:
        """See ``Observer.forget``."""
        self._timings.pop(key, None)

    def look(self, batcher: Batcher, *, idle: bool = False) -> None:
        """Decide, if it is time; called before each step is planned, and when there is none."""
        now_s = self._iteration_s = self.clock()
        idle_s = now_s - self._idle_since_s if self._idle_since_s is not None else 0.0
        if not idle:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        if idle or idle_s or now_s >= self._decided_s + DECIDE_EVERY_S:
            self._decided_s = now_s
            self._decide(self._state(batcher, now_s, idle_s))

    def began(self, planned: PlannedStep | Slice) -> None:
        """Note the requests whose first step, or next one, begins."""
        if isinstance(planned, Slice):
            return
        for chunk in planned.chunks:
            timing = self._timings.get(chunk.sequence.request.key)
            if timing is None or timing.began:
                continue
            timing.began = True
            if timing.last_token_s is None:
                cached = chunk.sequence.num_cached or 0
                self._ladder.arrivals.began(len(chunk.sequence.request.token_ids), cached)

    def ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        """Measure a step, and count its choices."""
        self._count(computed)
        if self.policy.mode != "auto" or isinstance(planned, Slice):
            return
        now_s = self.clock()
        step = StepTaken(
            now_s,
            now_s - self._iteration_s,
            planned.prompt_rows,
            planned.num_rows - planned.prompt_rows,
            self._ladder.state.thresholds,
        )
        self._ladder.note_step(step, self._step_rows)

    def told(self, events: Iterable[Event]) -> None:
        """Measure latencies, and forget requests that ended."""
        now_s = self.clock()
        for event in events:
            if isinstance(event, TokenEvent | ScoreEvent | PooledEvent):
                timing = self._timings.get(event.key)
                if timing is not None and timing.began:
                    self._note(timing, now_s)
            elif isinstance(event, FinishEvent | FailureEvent):
                ended = self._timings.pop(event.key, None)
                if ended is not None and isinstance(event, FinishEvent):
                    self._ladder.arrivals.ended(event.completion_tokens)

    def _count(self, computed: Computed) -> None:
        """Count a step's choices, and those of them that were degraded."""
        counts, substitution = computed.counts, computed.substitution
        num_degraded = 0 if counts.degraded is None else int(counts.degraded.sum())
        self._degraded = self._degraded * CHOICES_KEPT + num_degraded
        self._choices = self._choices * CHOICES_KEPT + sum(counts.choices)
        way = str(substitution.way if substitution is not None else 0)
        for phase, choices in zip(PHASES, counts.choices, strict=True):
            if choices:
                metrics.BROWNOUT_CHOICES.labels(phase).inc(choices)
        if num_degraded and counts.degraded is not None:
            for index, layer in counts.degraded.nonzero().tolist():
                number = int(counts.degraded[index, layer])
                metrics.BROWNOUT_DEGRADED_CHOICES.labels(PHASES[index], layer, way).inc(number)

    def load(self) -> BrownoutLoad:
        """Describe the state of brownout now, to metrics too."""
        state, now_s = self._ladder.state, self.clock()
        ttft_p90_s, tpot_p90_s = (self._ladder.windows[phase].p90_s(now_s) for phase in PHASES)
        degraded_share = self._degraded / self._choices if self._choices else 0.0
        metrics.BROWNOUT_P90.labels("prefill").set(ttft_p90_s or 0.0)
        metrics.BROWNOUT_P90.labels("decode").set(tpot_p90_s or 0.0)
        metrics.BROWNOUT_DEGRADED.set(degraded_share)
        return BrownoutLoad(
            self.policy.mode,
            state.thresholds.prefill,
            state.thresholds.decode,
            ttft_p90_s,
            tpot_p90_s,
            state.shedding,
            self._num_shed,
            degraded_share,
        )

    def take_decisions(self) -> list[BrownoutDecision]:
        """Return the decisions to tell since the last call, without names of a worker."""
        return self._sparse.take()

    def _note(self, timing: _Timing, now_s: float) -> None:
        phase: Phase = "prefill" if timing.last_token_s is None else "decode"
        since_s = timing.submitted_s if timing.last_token_s is None else timing.last_token_s
        self._ladder.note_latency(phase, now_s, now_s - since_s, exact=timing.exact)
        timing.began, timing.last_token_s = False, now_s

    def _decide(self, state: QueueState) -> None:
        decided = self._ladder.decide(state)
        if self._sparse.note(state.now_s, time.time(), self._ladder, self._num_shed):
            metrics.BROWNOUT_DECISIONS.inc()
        metrics.BROWNOUT_THRESHOLD.labels("prefill").set(decided.thresholds.prefill)
        metrics.BROWNOUT_THRESHOLD.labels("decode").set(decided.thresholds.decode)
        metrics.BROWNOUT_SHEDDING.set(decided.shedding)

    def _state(self, batcher: Batcher, now_s: float, idle_s: float) -> QueueState:
        if self.policy.mode in ("off", "manual"):
            return QueueState(now_s, idle_s=idle_s)
        prompts = [sequence for sequence in batcher.running if not sequence.decodes]
        waiting = [sequence for sequence in batcher.waiting if not batcher.holds(sequence)]
        keys = (sequence.request.key for sequence in waiting)
        timings = [timing for key in keys if (timing := self._timings.get(key)) is not None]
        # Those that have begun were preempted.
        fresh = [timing.submitted_s for timing in timings if timing.last_token_s is None]
        most = batcher.limits.max_num_batched_tokens
        # Without KV blocks for another one there is no place either.
        places = batcher.limits.max_num_seqs
        if batcher.lacks_blocks:
            places = max(1, len(batcher.running))
        self._step_rows = max(1, min(most, batcher.pace.rows()))
        return QueueState(
            now_s,
            len(waiting),
            sum(sequence.rows_left for sequence in waiting)
            + sum(sequence.rows_left for sequence in prompts),
            now_s - min(fresh, default=now_s),
            len(batcher.running) - len(prompts),
            self._step_rows,
            places,
            places - len(batcher.running),
            idle_s,
        )
