"""Spans of the runs of one engine: their queue, prefill and decode, with the experts of these.

Lives on the engine's event loop. While a traced run goes on, its steps are added up; its spans are made when it ends.
So they cost nothing for each token, and there are about as many of a long answer as of a short one.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from moesaic.dispatch.expert_waits import NOTHING, ExpertWaits, TellsOfWork, Work
from moesaic.engine.computing import Computed
from moesaic.engine.observer import Observer
from moesaic.engine.sequences.requests import Event, FailureEvent, FinishEvent, Request, RequestKey
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import MoesaicError
from moesaic.telemetry.otlp import Attributes, Spans, mark_failed

SHOWN_STEPS = {1, 8, 64, 512, 4096}  # of a phase, counted from 1: each has a span of its own
Joined = tuple["TracedRun", bool, int]  # a run in a step, if it decodes there, and its rows


@dataclass
class StepNote:
    """One step, or several steps of one phase.

    Attributes:
        start_ns: beginning of the first since 1970.
        end_ns: end of the last.
        steps: their number; a slice of a sweep is one.
        rows: of the run.
        batch_rows: of all runs.
        seconds: of computation.
        waits: for experts.
        work: of expert workers.
    """

    start_ns: int
    end_ns: int
    steps: int = 0
    rows: int = 0
    batch_rows: int = 0
    seconds: float = 0.0
    waits: ExpertWaits = NOTHING
    work: Work = field(default_factory=Work)

    def and_also(self, more: "StepNote") -> None:
        """Add later steps."""
        self.end_ns = more.end_ns
        self.steps += more.steps
        self.rows += more.rows
        self.batch_rows += more.batch_rows
        self.seconds += more.seconds
        self.waits = self.waits.and_also(more.waits)
        self.work.and_also(more.work)

    @property
    def attributes(self) -> Attributes:
        """The sums, as a span has them."""
        found: dict[str, int | float] = {
            "moesaic.steps": self.steps,
            "moesaic.rows": self.rows,
            "moesaic.batch_rows": self.batch_rows,
            "moesaic.computed_s": self.seconds,
        }
        if self.waits.num:
            found["moesaic.exchanges"] = self.waits.num
            found["moesaic.expert_wait_s"] = self.waits.seconds
        return found


@dataclass
class Phase:
    """The steps of one phase of a run: all together, and some alone."""

    total: StepNote
    shown: list[StepNote] = field(default_factory=list)

    def add(self, step: StepNote) -> None:
        """Add a step."""
        self.total.and_also(step)
        if self.total.steps in SHOWN_STEPS:
            self.shown.append(step)


@dataclass
class TracedRun:
    """A traced run that has not ended."""

    request: Request
    came_ns: int
    phases: dict[str, Phase] = field(default_factory=dict)
    placed_in: dict[int, str] = field(
        default_factory=dict
    )  # by epoch, in which trace it was placed
    failed_steps: int = 0

    def add(self, phase: str, step: StepNote) -> None:
        """Add a step to a phase."""
        found = self.phases.get(phase)
        if found is None:
            found = self.phases[phase] = Phase(StepNote(step.start_ns, step.start_ns))
        found.add(step)


class RunSpans(Observer):
    """Makes the spans of one engine's traced runs."""

    def __init__(self, spans: Spans, dispatcher: object) -> None:
        """``dispatcher``: what the engine computes experts by."""
        self._spans = spans
        self._teller = dispatcher if isinstance(dispatcher, TellsOfWork) else None
        self._open: dict[RequestKey, TracedRun] = {}
        self._step: list[Joined] = []  # the traced runs in the step that runs
        self._began_ns = 0

    def came(self, request: Request) -> None:
        """See ``Observer.came``."""
        if request.traceparent:
            self._open[request.key] = TracedRun(request, time.time_ns())

    def forget(self, key: RequestKey) -> None:
        """See ``Observer.forget``."""
        if (run := self._open.pop(key, None)) is not None:
            self._end(run, {"moesaic.outcome": "cancelled"})

    def began(self, planned: PlannedStep | Slice) -> None:
        """Find the traced runs of a step."""
        self._step = list(self._joined(planned)) if self._open else []
        if self._step:
            self._began_ns = time.time_ns()
            # That of steps before.
            self._take_work()

    def ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        """Add a step to its runs."""
        if not self._step:
            return
        now_ns, work = time.time_ns(), self._take_work()
        for run, decodes, rows in self._step:
            step = StepNote(self._began_ns, now_ns, 1, rows, planned.num_rows, computed.took_s)
            step.waits, step.work = computed.waits, work
            run.add("decode" if decodes else "prefill", step)
            if computed.placed_in:
                run.placed_in[computed.epoch] = computed.placed_in

    def failed(self, planned: PlannedStep | Slice, error: Exception) -> None:
        """Count a step that failed."""
        for run, _, _ in self._step:
            run.failed_steps += 1

    def told(self, events: Iterable[Event]) -> None:
        """End the spans of runs that have ended."""
        if not self._open:
            return
        for event in events:
            if not isinstance(event, FinishEvent | FailureEvent):
                continue
            if (run := self._open.pop(event.key, None)) is None:
                continue
            if isinstance(event, FailureEvent):
                self._end(run, {"moesaic.outcome": "failed"}, event.error)
                continue
            self._end(
                run,
                {
                    "moesaic.outcome": event.reason,
                    "moesaic.cached_tokens": event.cached_tokens,
                    "gen_ai.usage.input_tokens": event.prompt_tokens,
                    "gen_ai.usage.output_tokens": event.completion_tokens,
                    "moesaic.epochs": [str(epoch) for epoch, _ in event.epochs],
                },
            )

    def _joined(self, planned: PlannedStep | Slice) -> Iterable[Joined]:
        chunks = planned.chunks
        rows: dict[RequestKey, int] = {}
        for chunk in chunks:
            key = chunk.sequence.request.key
            rows[key] = rows.get(key, 0) + len(chunk.token_ids)
        for sequence in {id(each): each for each in planned.sequences}.values():
            if (run := self._open.get(sequence.request.key)) is not None:
                yield run, bool(sequence.decodes), rows.get(sequence.request.key, 0)

    def _take_work(self) -> Work:
        return self._teller.take_work() if self._teller is not None else Work()

    def _end(
        self, run: TracedRun, attributes: Attributes, failure: MoesaicError | None = None
    ) -> None:
        now_ns, request = time.time_ns(), run.request
        key = request.key
        known: dict[str, str | int] = {
            "moesaic.run_id": key.request_id,
            "moesaic.attempt": key.attempt,
            "moesaic.failed_steps": run.failed_steps,
        }
        span = self._spans.begin(
            "run",
            {"traceparent": request.traceparent},
            {**known, **attributes},
            kind="SERVER",
            start_ns=run.came_ns,
            linked=run.placed_in.values(),
        )
        # The caller's trace is not in the sample here.
        if span is None:
            return
        begun_ns = min((each.total.start_ns for each in run.phases.values()), default=now_ns)
        self._child(span, "queue", run.came_ns, begun_ns, {})
        for name, phase in run.phases.items():
            self._steps(span, name, phase.total, phase.shown)
        if failure is not None:
            mark_failed(span, failure.code)
        span.end(now_ns)

    def _steps(self, parent: Span, name: str, note: StepNote, shown: Iterable[StepNote]) -> None:
        span = self._child(parent, name, note.start_ns, note.end_ns, note.attributes)
        if span is None:
            return
        for worker_id, took_ns in note.work.took_ns.items():
            # When they began is not known; they take turns with attention, so they are shorter than the steps.
            end_ns = min(note.end_ns, note.start_ns + took_ns)
            attributes: Attributes = {
                "moesaic.worker_id": worker_id,
                "moesaic.layers": note.work.layers[worker_id],
                "moesaic.computed_s": took_ns * 1e-9,
            }
            self._child(span, "experts", note.start_ns, end_ns, attributes)
        # One step alone is the phase.
        for step in shown if note.steps > 1 else ():
            self._steps(span, "step", step, ())

    def _child(
        self, parent: Span, name: str, start_ns: int, end_ns: int, attributes: Attributes
    ) -> Span | None:
        span = self._spans.begin(name, parent, attributes, start_ns=start_ns)
        if span is not None:
            span.end(end_ns)
        return span
