"""A simulated attention worker: its planner plans, its steps take their time, and requests that come wait for it."""

import math
from collections.abc import Callable

from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.planning import PlannedRows, SimulatedRequest, StepOutcome, StepPlanner
from moesaic.simulation.step_clock import StepClock

Told = Callable[[StepOutcome], None]


class SimulatedWorker:
    """Computes one step after the other while there is something to do.

    Attributes:
        index: among the workers of its fleet.
        planner: of its steps.
        accepts: new requests.
        joined_s: the time it came.
        left_s: the time it had ended all that it had, after it was told to leave; endless before.
        num_steps: that have ended.
        num_tokens: of answers.
        busy_s: that steps took.
        attention_s: of these, it computed.
        experts_s: of these, the expert worker that had most to do computed.
    """

    __slots__ = (
        "_begun_s",
        "_clock",
        "_experts_part",
        "_first_s",
        "_growth_s",
        "_loop",
        "_num_steps",
        "_own_part",
        "_planned",
        "_run",
        "_told",
        "accepts",
        "attention_s",
        "busy_s",
        "experts_s",
        "index",
        "joined_s",
        "left_s",
        "num_steps",
        "num_tokens",
        "planner",
    )

    def __init__(
        self, index: int, loop: EventLoop, planner: StepPlanner, clock: StepClock, told: Told
    ) -> None:
        self.index, self.planner, self.accepts = index, planner, True
        self.joined_s, self.left_s = loop.now_s, math.inf
        self.num_steps = self.num_tokens = 0
        self.busy_s = self.attention_s = self.experts_s = 0.0
        self._loop, self._clock, self._told = loop, clock, told
        self._planned: PlannedRows | None = None  # and under way
        self._run = 0  # counts runs of steps, so that ends which no longer hold are told apart
        self._num_steps, self._begun_s, self._first_s, self._growth_s = 1, 0.0, 0.0, 0.0
        self._own_part = self._experts_part = 0.0

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request, for the next step.

        Raises:
            MoesaicError: see ``StepPlanner.submit``.
        """
        self.planner.submit(request)
        if self._planned is None:
            self._begin()
        else:
            self.cut()

    def leave(self) -> None:
        """Take no more requests, and be gone once those that are here have ended."""
        self.accepts = False
        if self._planned is None:
            self.left_s = self._loop.now_s

    def cut(self) -> None:
        """Have a run of alike steps end with the step under way, so that the next one is planned anew."""
        if self._num_steps == 1:
            return
        elapsed_s = self._loop.now_s - self._begun_s
        num_steps = self._steps_by(elapsed_s)
        if num_steps < self._num_steps:
            self._num_steps = num_steps
            self._schedule()

    def _begin(self) -> None:
        self._planned = planned = self.planner.next_step()
        if planned is None:
            if not self.accepts:
                self.left_s = self._loop.now_s
            return
        time, growth_s = self._clock.time(planned)
        noise = self._clock.noise(planned.most_steps)
        self._num_steps, self._begun_s = planned.most_steps, self._loop.now_s
        self._first_s, self._growth_s = time.seconds * noise, growth_s * noise
        self._own_part = time.attention_s / time.seconds if time.seconds else 0.0
        self._experts_part = time.experts_s / time.seconds if time.seconds else 0.0
        self._schedule()

    def _schedule(self) -> None:
        self._run += 1
        self._loop.at(self._begun_s + self._seconds(self._num_steps), self._end, self._run)

    def _end(self, run: int) -> None:
        if run != self._run:
            return  # it was cut
        seconds = self._loop.now_s - self._begun_s
        self.num_steps += self._num_steps
        self.busy_s += seconds
        self.attention_s += seconds * self._own_part
        self.experts_s += seconds * self._experts_part
        outcome = self.planner.took(self._num_steps, seconds)
        self.num_tokens += outcome.num_tokens
        self._num_steps = 1
        if outcome.began or outcome.ended:
            self._told(outcome)
        self._begin()

    def _seconds(self, num_steps: int) -> float:
        """Seconds of the first steps of the run."""
        return num_steps * (self._first_s + self._growth_s * (num_steps - 1) / 2)

    def _steps_by(self, elapsed_s: float) -> int:
        """Count the steps that have ended so many seconds after the run began, and the one under way."""
        half = self._growth_s / 2
        linear = self._first_s - half
        root = math.sqrt(max(0.0, linear * linear + 4 * half * elapsed_s))
        found = math.ceil(2 * elapsed_s / (linear + root)) if linear + root > 0 else 1
        found = min(max(found, 1), self._num_steps)
        while found > 1 and self._seconds(found - 1) >= elapsed_s:
            found -= 1
        while found < self._num_steps and self._seconds(found) < elapsed_s:
            found += 1
        return found
