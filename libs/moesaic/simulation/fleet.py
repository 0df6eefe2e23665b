"""A simulated fleet: requests arrive, a router gives them to workers, and workers come and go."""

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.messages.scaling import FleetShape
from moesaic.simulation.arrivals import ArrivalTrace
from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.planning import SimulatedRequest, StepOutcome, StepPlanner
from moesaic.simulation.records import LatencyFigures, RequestRecords, ServingFigures
from moesaic.simulation.routing import FleetRouter, LeastOutstanding, Routed
from moesaic.simulation.step_clock import StepClock
from moesaic.simulation.workers import SimulatedWorker


@dataclass(frozen=True)
class PathDelays:
    """Seconds outside of workers.

    Attributes:
        entry_s: from a request's arrival until a worker has it.
        exit_s: from a step's end until its tokens have arrived.
    """

    entry_s: float = 0.0
    exit_s: float = 0.0


NO_DELAYS = PathDelays()


class SimulatedFleet:
    """Serves the requests of a trace.

    Attributes:
        loop: of the simulation.
        clock: of steps; its shape counts the workers that take requests.
        records: of the requests.
        workers: all that there ever were.
        num_refused: requests that could never run, or that were too many.
    """

    def __init__(
        self,
        loop: EventLoop,
        trace: ArrivalTrace,
        make_planner: Callable[[], StepPlanner],
        clock: StepClock,
        router: FleetRouter | None = None,
        delays: PathDelays = NO_DELAYS,
    ) -> None:
        """Have the workers that the clock's shape asks for, and the trace's requests arrive.

        Args:
            loop: to be run by the caller.
            trace: of requests, from the loop's time on.
            make_planner: makes the planner of a new worker.
            clock: of steps.
            router: of requests; None: each goes to the worker that has the fewest.
            delays: outside of workers.
        """
        self.loop, self.clock, self.records = loop, clock, RequestRecords(trace)
        self.workers: list[SimulatedWorker] = []
        self.num_refused = self._num_arrived = 0
        self._trace, self._make_planner, self._delays = trace, make_planner, delays
        self._router: FleetRouter = router if router is not None else LeastOutstanding()
        self._began_s = loop.now_s
        self._num_active = 0
        self._coming = 0  # workers on their way
        self._cancelled = 0  # of these
        self._overdue_s: float | None = None  # that the loop knows of
        for _ in range(clock.shape.attention):
            self._join()
        if len(trace):
            self._await(0)

    @property
    def num_active(self) -> int:
        """Workers that take requests."""
        return self._num_active

    @property
    def num_open(self) -> int:
        """Requests that workers have."""
        return sum(worker.planner.num_open for worker in self.workers)

    @property
    def worker_s(self) -> float:
        """Seconds of all workers up to now, from when they came until they had ended all that they had."""
        now_s = self.loop.now_s
        return sum(min(now_s, w.left_s) - w.joined_s for w in self.workers)

    def resize(self, attention: int, delay_s: float = 0.0) -> None:
        """Have so many attention workers: new ones take requests after ``delay_s``; others get no more, and end those
        that they have."""
        if attention < 1:
            raise InvalidInput("attention", f"must be 1 or more, got {attention}")
        missing = attention - self._num_active - self._coming
        while missing < 0 and self._coming:  # those that have not come yet are the first to go
            self._coming, self._cancelled, missing = (
                self._coming - 1,
                self._cancelled + 1,
                missing + 1,
            )
        for _ in range(missing):
            self._coming += 1
            self.loop.after(delay_s, self._arrive_worker)
        for worker in reversed(self.workers):
            if missing >= 0:
                break
            if worker.accepts:
                missing += 1
                worker.leave()
                self._num_active -= 1
                self._router.left(worker.index)
        self.reshape(FleetShape(self._num_active, self.clock.shape.experts))

    def reshape(self, shape: FleetShape) -> None:
        """Have steps take the times of another shape, from each worker's next one on."""
        if shape != self.clock.shape:
            self.clock.shape = shape
            for worker in self.workers:
                worker.cut()

    def figures(self, start_s: float = 0.0) -> ServingFigures:
        """Gather the figures up to now, those of latencies of requests from ``start_s`` on."""
        records, workers = self.records, self.workers
        chosen = self._trace.at_s >= start_s
        span_s = self.loop.now_s - self._began_s
        steps, tokens = (sum(w.num_steps for w in workers), sum(w.num_tokens for w in workers))
        return ServingFigures(
            requests=self._num_arrived,
            ended=int((records.ended_s >= 0).sum()),
            refused=self.num_refused,
            ttft=LatencyFigures.of(records.ttft_s[chosen]),
            tpot=LatencyFigures.of(records.tpot_s[chosen]),
            tokens_per_s=tokens / span_s if span_s else 0.0,
            attention_busy=sum(w.attention_s for w in workers) / (self.worker_s or 1.0),
            experts_busy=sum(w.experts_s for w in workers) / (self.worker_s or 1.0),
            steps=steps,
            events=self._num_arrived + steps + tokens,
        )

    def _await(self, number: int) -> None:
        at_s = float(self._trace.at_s[number]) + self._began_s + self._delays.entry_s
        self.loop.at(at_s, self._arrive, number)

    def _arrive(self, number: int) -> None:
        trace = self._trace
        self._num_arrived += 1
        request = SimulatedRequest(
            number,
            int(trace.prompt_tokens[number]),
            int(trace.answer_tokens[number]),
            int(trace.cached_tokens[number]),
        )
        if number + 1 < len(trace):
            self._await(number + 1)
        try:
            routed = self._router.submitted(request, self.loop.now_s)
        except MoesaicError:
            self.num_refused += 1
        else:
            self._give(routed)

    def _give(self, routed: Routed) -> None:
        for request, index in routed:
            request.worker = self.records.worker[request.number] = index
            try:
                self.workers[index].submit(request)
            except MoesaicError:
                self.num_refused += 1
                self._give(self._router.ended(request, self.loop.now_s))
        due_s = self._router.next_overdue_s()
        if due_s is not None and due_s != self._overdue_s:
            self._overdue_s = due_s
            self.loop.at(max(due_s, self.loop.now_s), self._overdue)

    def _overdue(self, _: int) -> None:
        self._overdue_s = None
        self._give(self._router.overdue(self.loop.now_s))

    def _told(self, outcome: StepOutcome) -> None:
        now_s = self.loop.now_s
        at_s = now_s - self._began_s + self._delays.exit_s
        for request in outcome.began:
            self.records.began_s[request.number] = at_s
            if routed := self._router.began(request, now_s):
                self._give(routed)
        for request in outcome.ended:
            self.records.ended_s[request.number] = at_s
            if routed := self._router.ended(request, now_s):
                self._give(routed)

    def _arrive_worker(self, _: int) -> None:
        if self._cancelled:
            self._cancelled -= 1
            return
        self._coming -= 1
        self._join()
        self.reshape(FleetShape(self._num_active, self.clock.shape.experts))

    def _join(self) -> None:
        index = len(self.workers)
        worker = SimulatedWorker(index, self.loop, self._make_planner(), self.clock, self._told)
        self.workers.append(worker)
        self._num_active += 1
        self._give(self._router.joined(index, self.loop.now_s))
