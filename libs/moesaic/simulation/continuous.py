"""Plain continuous batching, whose steps cost nothing to plan while nothing changes: for studies of large fleets.

Generations that have begun get a token in each step; prompts get the rows that are left, first come, first served.

===================  ===============================================================================================
Unlike the engine's  ``Batcher``
===================  ===============================================================================================
KV                   is kept for the whole answer before a request begins, so nothing is preempted
rows of prompts      are as many as the limits allow, however long the step takes
tenants, priorities  there are none
===================  ===============================================================================================
"""

from collections import deque
from heapq import heappop, heappush

from moesaic.errors import InvalidInput
from moesaic.scaling.contract import ServingLimits
from moesaic.simulation.planning import PlannedRows, SimulatedRequest, StepOutcome


class _Prompt:
    """A prompt under way: ``computed`` tokens are there, ``rows`` more are planned."""

    __slots__ = ("computed", "request", "rows")

    def __init__(self, request: SimulatedRequest) -> None:
        self.request, self.computed, self.rows = request, request.cached_tokens, 0

    def plan(self, room: int) -> int:
        """Plan the next rows, ``room`` at most; return the keys that they see."""
        self.rows = rows = min(room, self.request.prompt_tokens - self.computed)
        return rows * self.computed + rows * (rows + 1) // 2


class ContinuousPlanner:
    """Plans steps of one worker. A run of steps without prompts goes on until the first of their answers ends."""

    __slots__ = (
        "_ends",
        "_free_tokens",
        "_keys",
        "_most_rows",
        "_most_seqs",
        "_one_by_one",
        "_planned",
        "_prompts",
        "_step",
        "_waiting",
        "kv_tokens",
    )

    def __init__(self, limits: ServingLimits, *, one_by_one: bool = False) -> None:
        """Begin with nothing to do.

        Args:
            limits: of the worker.
            one_by_one: plan each step by itself.

        Raises:
            InvalidInput: a step may have more sequences than rows.
        """
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise InvalidInput(
                "max_num_batched_tokens", f"must be max_num_seqs, {limits.max_num_seqs}, or more"
            )
        self._most_rows, self._most_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.kv_tokens = self._free_tokens = limits.kv_tokens
        self._one_by_one = one_by_one
        self._waiting: deque[SimulatedRequest] = deque()
        self._prompts: deque[_Prompt] = deque()  # that have begun, and have no token
        self._planned = 0  # of these, with rows in the planned step
        self._ends: list[tuple[int, int, SimulatedRequest]] = []  # by the step of the last token
        self._step = 0  # with answers
        self._keys = 0  # that the next step's answers see

    @property
    def num_open(self) -> int:
        """See ``StepPlanner``."""
        return len(self._waiting) + len(self._prompts) + len(self._ends)

    def submit(self, request: SimulatedRequest) -> None:
        """See ``StepPlanner``."""
        if (tokens := request.prompt_tokens + request.answer_tokens) > self.kv_tokens:
            raise InvalidInput(
                "prompt_tokens",
                f"prompt and answer must be at most {self.kv_tokens} tokens, got {tokens}",
            )
        self._waiting.append(request)

    def next_step(self) -> PlannedRows | None:
        """See ``StepPlanner``."""
        answers = len(self._ends)
        room, keys = self._most_rows - answers, 0
        self._planned = 0
        if self._prompts or self._waiting:
            whole = room
            for prompt in self._prompts:
                if not room:
                    break
                keys += prompt.plan(room)
                room -= prompt.rows
                self._planned += 1
            while room and (begun := self._begin()):
                keys += begun.plan(room)
                room -= begun.rows
                self._planned += 1
            if self._planned:
                return PlannedRows(whole - room, answers, self._keys, keys)
        if not answers:
            return None
        alike = 1 if self._one_by_one else self._ends[0][0] - self._step
        return PlannedRows(0, answers, self._keys, 0.0, alike)

    def took(self, num_steps: int, seconds: float) -> StepOutcome:
        """See ``StepPlanner``."""
        began, ended = list[SimulatedRequest](), list[SimulatedRequest]()
        ends = self._ends
        num_tokens = len(ends) * num_steps
        if ends:
            self._step += num_steps
            self._keys += num_tokens
            while ends and ends[0][0] == self._step:
                ended.append(request := heappop(ends)[2])
                tokens = request.prompt_tokens + request.answer_tokens
                self._keys -= tokens
                self._free_tokens += tokens
        for _ in range(self._planned):
            prompt = self._prompts[0]
            prompt.computed += prompt.rows
            request = prompt.request
            if prompt.computed < request.prompt_tokens:
                break  # it has taken the last rows
            self._prompts.popleft()
            began.append(request)
            if request.answer_tokens == 1:
                ended.append(request)
                self._free_tokens += request.prompt_tokens + 1
            else:
                end = self._step + request.answer_tokens - 1
                heappush(ends, (end, request.number, request))
                self._keys += request.prompt_tokens + 1
        self._planned = 0
        return StepOutcome(began, ended, num_tokens + len(began))

    def _begin(self) -> _Prompt | None:
        """Let the next request begin, if there is one and a place for it."""
        if not self._waiting or len(self._ends) + len(self._prompts) >= self._most_seqs:
            return None
        request = self._waiting[0]
        tokens = request.prompt_tokens + request.answer_tokens
        if tokens > self._free_tokens:
            return None
        self._free_tokens -= tokens
        self._prompts.append(prompt := _Prompt(self._waiting.popleft()))
        return prompt
