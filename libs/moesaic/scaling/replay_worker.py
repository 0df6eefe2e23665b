"""One attention worker of a replay: continuous batching with chunked prefill, many alike steps at once.

Generations that have begun get a token in each step; prompts get the rows that are left, first come, first served,
as many as a step has time for.
KV is kept for the whole answer before a request begins, so none is preempted.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from moesaic.scaling.contract import ServingLimits, StepRows, StepTime

_LEAST_ROWS = 64  # of prompts in a step, however long they take: see ``engine.steps.pace``
TimeOfStep = Callable[[StepRows], StepTime]


@dataclass
class ReplayedRequests:
    """Requests of a replay in the order of their arrival, and what became of them.

    Attributes:
        at_s: times of their arrival.
        prompt_tokens: to be computed.
        answer_tokens: tokens of their answers, at least one.
        counted_from: earlier ones only keep the fleet busy.
        ttft_limit_s: longer ones are late.
        tpot_limit_s: likewise.
        ttft_s: TTFT of those that have their first token, by request.
        tpot_s: TPOT of those that have ended, and had more than one.
        num_late: counted ones that missed a target.
    """

    at_s: list[float]
    prompt_tokens: list[int]
    answer_tokens: list[int]
    counted_from: int = 0
    ttft_limit_s: float = math.inf
    tpot_limit_s: float = math.inf
    ttft_s: dict[int, float] = field(default_factory=dict)
    tpot_s: dict[int, float] = field(default_factory=dict)
    num_late: int = 0

    def began(self, request: int, now_s: float) -> None:
        """Note a first token."""
        waited_s = now_s - self.at_s[request]
        self.ttft_s[request] = waited_s
        if waited_s > self.ttft_limit_s and request >= self.counted_from:
            self.num_late += 1

    def had_later(self, request: int, num_tokens: int, now_s: float) -> None:
        """Record that a request has this number of later tokens, and gets no more."""
        ttft_s = self.ttft_s[request]
        self.tpot_s[request] = tpot_s = (now_s - self.at_s[request] - ttft_s) / num_tokens
        # Counts once
        late = tpot_s > self.tpot_limit_s and ttft_s <= self.ttft_limit_s
        if late and request >= self.counted_from:
            self.num_late += 1


@dataclass
class _Run:
    """Alike steps, one after the other; those with prompts are alone.

    Attributes:
        begin_s: start of the first.
        num_steps: number of steps of the run.
        first: time of the first.
        last: of the last one that was planned.
        planned_steps: from ``first`` to ``last``: between them, times grow evenly.
        prompts: requests that get rows of their prompts, and how many.
    """

    begin_s: float
    num_steps: int
    first: StepTime
    last: StepTime
    prompts: list[tuple[int, int]]

    def __post_init__(self) -> None:
        self.planned_steps = self.num_steps

    def total(self, first: float, last: float, num_steps: int) -> float:
        """Add up what grows evenly over the planned steps, for the first ones of them."""
        if num_steps == 1:
            return first
        growth = (last - first) / (self.planned_steps - 1)
        return num_steps * first + growth * (num_steps * (num_steps - 1) // 2)

    def end_s(self, num_steps: int) -> float:
        """Return the end of one of the steps."""
        return self.begin_s + self.total(self.first.seconds, self.last.seconds, num_steps)


class ReplayWorker:
    """Serves its requests up to a given time.

    Attributes:
        next_s: nothing changes before, unless a request is added.
        num_open: requests that have not ended.
        attention_s: seconds in which it computed.
        experts_s: seconds in which an expert worker computed for it.
    """

    def __init__(
        self, requests: ReplayedRequests, time_of: TimeOfStep, limits: ServingLimits
    ) -> None:
        """Begin with nothing to do."""
        self._requests, self._time_of = requests, time_of
        self._most_rows = limits.max_num_batched_tokens
        self._most_seqs = min(limits.max_num_seqs, self._most_rows)
        self._free_tokens, self._step_target_s = limits.kv_tokens, limits.step_target_s
        self._waiting: deque[int] = deque()
        self._prompts: dict[int, int] = {}  # tokens that are computed, of those without a token
        self._ends: list[tuple[int, int]] = []  # by the step of the last token
        self._step = 0  # of those with answers, that were run
        self._keys = 0  # that all answers see in the next step
        self._run: _Run | None = None
        self._begin_s = -math.inf  # of the next run
        self.next_s = math.inf
        self.num_open = 0
        self.attention_s = self.experts_s = 0.0

    def add(self, request: int, now_s: float) -> None:
        """Take one more request; everything up to ``now_s`` has been run."""
        if self._run is None and not self.num_open:
            self._begin_s = max(self._begin_s, now_s)
        self._waiting.append(request)
        self.num_open += 1
        if self._run is None:
            self.next_s = self._begin_s
        elif len(self._waiting) == 1 and not self._run.prompts and self._has_room():
            self._cut(now_s)

    def advance(self, until_s: float) -> None:
        """Run all steps that end by ``until_s``, and begin those that begin before."""
        while self.next_s <= until_s:
            if self._run is not None:
                self._end_run(self._run)
            elif self.next_s < until_s:
                self._plan()
            else:
                # What arrives at the same time has a part in it.
                return

    def close(self, end_s: float) -> None:
        """Run all steps that begin before ``end_s``, and record the tokens of generations in flight."""
        self.advance(end_s)
        if self._run is not None:
            self._cut(end_s)
            self._end_run(self._run)
        for last_step, request in self._ends:
            had = self._requests.answer_tokens[request] - 1 - (last_step - self._step)
            if had:
                self._requests.had_later(request, had, self._begin_s)

    def overdue(self, since_s: float) -> int:
        """Count waiting requests that arrived before ``since_s``, and shall be counted."""
        number, at_s = 0, self._requests.at_s
        for request in self._waiting:
            if at_s[request] >= since_s:
                break
            number += request >= self._requests.counted_from
        return number

    def _has_room(self) -> bool:
        """Tell if the first of those that wait may begin."""
        running = len(self._ends) + len(self._prompts)
        return running < self._most_seqs and (
            not running or self._need(self._waiting[0]) <= self._free_tokens
        )

    def _need(self, request: int) -> int:
        return self._requests.prompt_tokens[request] + self._requests.answer_tokens[request]

    def _plan(self) -> None:
        answers = len(self._ends)
        planned = self._prompts_within(self._most_rows - answers)
        first = last = self._time_with(planned)
        if planned and self._step_target_s and first.seconds > self._step_target_s:
            planned = self._prompts_within(self._fewer_rows(planned, first.seconds))
            first = last = self._time_with(planned)
        steps = 1 if planned else self._ends[0][0] - self._step
        if steps > 1:
            last = self._time_of(StepRows(0, answers, self._keys + answers * (steps - 1)))
        self._run = run = _Run(self._begin_s, steps, first, last, planned)
        self.next_s = run.end_s(steps)

    def _prompts_within(self, room: int) -> list[tuple[int, int]]:
        """Give rows to prompts that have begun, and let waiting ones begin while there is room."""
        planned: list[tuple[int, int]] = []
        prompt_tokens = self._requests.prompt_tokens
        for request, computed in self._prompts.items():
            if room <= 0:
                return planned
            planned.append((request, min(room, prompt_tokens[request] - computed)))
            room -= planned[-1][1]
        while room > 0 and self._waiting and self._has_room():
            request = self._waiting.popleft()
            self._free_tokens -= self._need(request)
            self._prompts[request] = 0
            planned.append((request, min(room, prompt_tokens[request])))
            room -= planned[-1][1]
        return planned

    def _fewer_rows(self, planned: list[tuple[int, int]], seconds: float) -> int:
        """Return how many rows of prompts a step has time for, as ``engine.steps.pace`` finds it.

        Args:
            planned: rows that make the step too long.
            seconds: time that it would take.
        """
        answers, rows = len(self._ends), sum(taken for _, taken in planned)
        alone_s = self._time_of(StepRows(0, answers, self._keys)).seconds
        allowed_s = max(self._step_target_s - alone_s, alone_s * (1 if answers else 2))
        fitting = int(rows * allowed_s / (seconds - alone_s)) if seconds > alone_s else rows
        return min(rows, max(_LEAST_ROWS, fitting))

    def _time_with(self, planned: list[tuple[int, int]]) -> StepTime:
        """Time the next step with these rows of prompts."""
        rows = prompt_keys = 0
        for request, taken in planned:
            rows += taken
            prompt_keys += taken * self._prompts[request] + taken * (taken + 1) // 2
        return self._time_of(StepRows(rows, len(self._ends), self._keys, prompt_keys))

    def _cut(self, until_s: float) -> None:
        """End the run with the first of its steps that ends at or after ``until_s``."""
        run = self._run
        if run is None or run.num_steps == 1:
            return
        least, most = 1, run.num_steps
        while least < most:
            middle = (least + most) // 2
            if run.end_s(middle) >= until_s:
                most = middle
            else:
                least = middle + 1
        run.num_steps = least
        self.next_s = run.end_s(least)

    def _end_run(self, run: _Run) -> None:
        requests, first, last, steps = self._requests, run.first, run.last, run.num_steps
        now_s = self._begin_s = self.next_s
        self._run = None
        self.attention_s += run.total(first.attention_s, last.attention_s, steps)
        self.experts_s += run.total(first.experts_s, last.experts_s, steps)
        if self._ends:
            self._step += steps
            self._keys += steps * len(self._ends)
        while self._ends and self._ends[0][0] <= self._step:
            request = heappop(self._ends)[1]
            self._keys -= self._need(request)
            requests.had_later(request, requests.answer_tokens[request] - 1, now_s)
            self._ended(request)
        for request, rows in run.prompts:
            computed = self._prompts[request] + rows
            if computed < requests.prompt_tokens[request]:
                self._prompts[request] = computed
                continue
            del self._prompts[request]
            requests.began(request, now_s)
            later = requests.answer_tokens[request] - 1
            if later:
                heappush(self._ends, (self._step + later, request))
                self._keys += computed + 1
            else:
                self._ended(request)
        self.next_s = now_s if self.num_open else math.inf

    def _ended(self, request: int) -> None:
        self._free_tokens += self._need(request)
        self.num_open -= 1
