"""StepLedger: costs of one engine's steps, and the requests behind them, for reports.

Lives on the engine's event loop, like the engine. Costs are fitted as they come; all else is kept until it
is taken.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from moesaic.costs import CostBook, RandomChoice
from moesaic.engine.computing import Computed
from moesaic.engine.observer import Observer
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    PooledEvent,
    Request,
    RequestKey,
    ScoreEvent,
    TokenEvent,
)
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.messages.performance import MOST_KEPT, Arrival, LoadReport, Part, RequestLatency

MEASURED_STEPS = 64  # of a report, about
FORGET = 0.999  # what a step counts after the next one
# Answers that ended lately: one that has begun is taken to be as long as one of them.
LATE_LENGTHS = 64
# While no answer has ended, one of at most so many is taken to use them all; others are not known.
FEW_TOKENS = 16
CACHED_PART = 1 / 32  # of the last request, in the mean share of prompts that are cached


@dataclass
class _OpenRequest:
    """A request that has not ended."""

    came_s: float
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0


class _Length(NamedTuple):
    """Tokens of an answer that ended."""

    tokens: int
    was_cut: bool  # by its request's limit


class StepWork(NamedTuple):
    """The work of one step, in the terms of ``step`` after the first."""

    experts: float
    prompt_rows: int
    answer_rows: int
    keys: int
    prompt_keys: int

    @classmethod
    def of(cls, planned: PlannedStep, choice: RandomChoice) -> "StepWork":
        """Count the work of a step before it is computed: then prompts may have come to their end."""
        # Of prompts, and of answers.
        rows, keys = [0, 0], [0, 0]
        for chunk in planned.chunks:
            count, phase = len(chunk.token_ids), int(chunk.sequence.decodes)
            rows[phase] += count
            keys[phase] += count * chunk.start + count * (count + 1) // 2
        return cls(choice.experts(sum(rows)), rows[0], rows[1], keys[1], keys[0])


@dataclass
class StepLedger(Observer):
    """Notes steps and requests of one engine.

    Attributes:
        choice: of the model's gate, as the costs of steps take it to be.
        book: the fits of costs.
        work: of the step that runs, if that one is measured.
    """

    choice: RandomChoice
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    book: CostBook = field(default_factory=lambda: CostBook(FORGET))
    work: StepWork | None = None

    def __post_init__(self) -> None:
        self._open: dict[RequestKey, _OpenRequest] = {}
        self._lengths: deque[_Length] = deque(maxlen=LATE_LENGTHS)
        self._num_drawn, self._cached_share, self._stride = 0, 0.0, 1
        self._num_steps = self._last_steps = self._next_measured = 0
        self._free_s = self.clock()
        self._begin_anew()

    def came(self, request: Request) -> None:
        """See ``Observer.came``."""
        self._open[request.key] = _OpenRequest(self.clock())
        self._arrived += 1
        if len(self._arrivals) < MOST_KEPT:
            prompt, answer = len(request.token_ids), self._expected_tokens(request)
            cached = round(prompt * self._cached_share)
            self._arrivals.append(Arrival(self.wall_clock(), prompt, answer, cached))

    def forget(self, key: RequestKey) -> None:
        """See ``Observer.forget``."""
        self._open.pop(key, None)

    def began(self, planned: PlannedStep | Slice) -> None:
        """Count the work of a step, if it is one of those that are measured: of many short ones some."""
        self.work = None
        if isinstance(planned, Slice):
            return
        self._num_steps += 1
        if self._num_steps >= self._next_measured:
            self._next_measured = self._num_steps + self._stride
            self.work = StepWork.of(planned, self.choice)

    def ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        """Take the costs of a step that is measured.

        It counts from the end of the last one, or from ``resumed``: to plan it, and to tell what the last has
        found, keeps the worker busy.
        """
        now_s = self.clock()
        seconds, self._free_s = now_s - self._free_s, now_s
        if (work := self.work) is None:
            return
        self.book.add("step", (1, *work), seconds)
        if not (waits := computed.waits).num:
            return
        own = 1, work.prompt_rows + work.answer_rows, work.keys, work.prompt_keys
        self.book.add("attention", own, seconds - waits.seconds)
        if waits.beyond_s > 0:
            part: Part = "link.inter" if waits.is_inter else "link.intra"
            amounts = 2 * waits.num, waits.messages, waits.nbytes
            self.book.add(part, amounts, waits.beyond_s)

    def failed(self, planned: PlannedStep | Slice, error: Exception) -> None:
        """Leave the time until now out of the next step's."""
        self.resumed()

    def resumed(self) -> None:
        """Leave the time until now out of the next step's."""
        self._free_s = self.clock()

    def told(self, events: Iterable[Event]) -> None:
        """Measure latencies. A request that fails has missed its targets."""
        now_s = self.clock()
        for event in events:
            if isinstance(event, TokenEvent | ScoreEvent | PooledEvent):
                found = self._open.get(event.key)
                if found is not None:
                    found.first_s = found.first_s or now_s
                    found.last_s, found.tokens = now_s, found.tokens + 1
            elif isinstance(event, FinishEvent):
                self._end(self._open.pop(event.key, None), event)
            elif isinstance(event, FailureEvent):
                self._miss(self._open.pop(event.key, None))

    def take(self, more: CostBook | None = None) -> LoadReport:
        """Take what came together since the last call; ``more``: costs that somebody else measures."""
        costs = (more.sums() if more is not None else {}) | self.book.sums()
        report = LoadReport(
            window_s=self.clock() - self._began_s,
            arrivals=self._arrivals,
            arrived=self._arrived,
            latencies=self._latencies,
            ended=self._ended,
            costs=costs,
        )
        # Of the next report about as many are measured, however short its steps: by count, as by time long ones would
        # be measured more often.
        self._stride = max(1, (self._num_steps - self._last_steps) // MEASURED_STEPS)
        self._next_measured = min(self._next_measured, self._num_steps + self._stride)
        self._last_steps = self._num_steps
        self._begin_anew()
        return report

    def _begin_anew(self) -> None:
        self._began_s = self.clock()
        self._arrivals: list[Arrival] = []
        self._latencies: list[RequestLatency] = []
        self._arrived = self._ended = 0

    def _expected_tokens(self, request: Request) -> int:
        """Take the answer to be as long as one that ended lately, each in turn.

        One that its limit has cut would have been as long as a longer one, if this request's limit allows (the
        estimate of Kaplan and Meier).
        """
        if not isinstance(request.task, GenerationTask):
            return 1
        self._num_drawn += 1
        lengths, most = list(self._lengths), request.task.max_tokens
        if not lengths:
            return most if most <= FEW_TOKENS else 0
        tokens, was_cut = lengths[self._num_drawn % len(lengths)]
        while was_cut and tokens < most:
            lengths = [each for each in lengths if each.tokens > tokens]
            if not lengths:
                break
            tokens, was_cut = lengths[self._num_drawn % len(lengths)]
        return max(1, min(tokens, most))

    def _end(self, ended: _OpenRequest | None, event: FinishEvent) -> None:
        if ended is None:
            return
        share = event.cached_tokens / event.prompt_tokens if event.prompt_tokens else 0.0
        self._cached_share += CACHED_PART * (share - self._cached_share)
        if event.completion_tokens:
            self._lengths.append(_Length(event.completion_tokens, event.reason == "length"))
        first_s = self.clock() if ended.first_s is None else ended.first_s
        later = max(0, ended.tokens - 1)
        tpot_s = (ended.last_s - first_s) / later if later else 0.0
        self._add(RequestLatency(first_s - ended.came_s, tpot_s))

    def _miss(self, ended: _OpenRequest | None) -> None:
        """Count a request that ended without its answer as one that takes for ever."""
        if ended is not None:
            self._add(RequestLatency(math.inf))

    def _add(self, latency: RequestLatency) -> None:
        self._ended += 1
        if len(self._latencies) < MOST_KEPT:
            self._latencies.append(latency)
