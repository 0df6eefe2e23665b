"""The engine's own batcher as the planner of a simulated worker, so that a simulation takes production's decisions."""

from collections.abc import Callable

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey
from moesaic.engine.sequences.sequence import Chunk, GenerationSequence
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.planned_step import PlannedStep
from moesaic.simulation.planning import PlannedRows, SimulatedRequest, StepOutcome

TokensOf = Callable[[SimulatedRequest], tuple[int, ...]]


def alike_tokens(request: SimulatedRequest) -> tuple[int, ...]:
    """Make a prompt of the right length, for batchers that share nothing."""
    return (0,) * request.prompt_tokens


class BatcherPlanner:
    """Plans steps by a batcher, and tells it what the engine would.

    Tokens that requests call cached are not so here: the batcher finds what it has, by the tokens of prompts. It is
    told seconds with the time between steps, of which a real engine's batcher is told none.
    """

    def __init__(self, batcher: Batcher, tokens_of: TokensOf = alike_tokens) -> None:
        """Plan by ``batcher``, which is this planner's own; prompts have the tokens of ``tokens_of``."""
        self.batcher, self._tokens_of = batcher, tokens_of
        self._requests: dict[RequestKey, SimulatedRequest] = {}
        self._planned: PlannedStep | None = None

    @property
    def num_open(self) -> int:
        """See ``StepPlanner``."""
        return len(self._requests)

    def submit(self, request: SimulatedRequest) -> None:
        """See ``StepPlanner``."""
        key = RequestKey(str(request.number))
        task = GenerationTask(max_tokens=request.answer_tokens)
        displaced = self.batcher.submit(Request(key, self._tokens_of(request), task))
        if displaced:
            raise AssertionError("requests of one tenant and priority do not displace each other")
        self._requests[key] = request

    def next_step(self) -> PlannedRows | None:
        """See ``StepPlanner``."""
        planned = self.batcher.next_step()
        if not isinstance(planned, PlannedStep):
            raise AssertionError("generations are not swept")
        self._planned = planned
        if not planned.chunks:
            return None
        num_rows = sum(len(chunk.token_ids) for chunk in planned.chunks)
        prompts = [chunk for chunk in planned.chunks if not chunk.sequence.decodes]
        prompt_keys = sum(map(_keys_of, prompts))
        keys = sum(map(_keys_of, planned.chunks)) - prompt_keys
        answer_rows = num_rows - planned.prompt_rows
        return PlannedRows(planned.prompt_rows, answer_rows, keys, prompt_keys)

    def took(self, num_steps: int, seconds: float) -> StepOutcome:
        """See ``StepPlanner``. Its steps come one by one."""
        planned = self._planned
        if planned is None or num_steps != 1:
            raise AssertionError("one step at a time is planned, and then taken")
        began, ended, num_tokens = list[SimulatedRequest](), list[SimulatedRequest](), 0
        for chunk in planned.chunks:
            sequence = chunk.sequence
            self.batcher.commit(chunk)
            if not isinstance(sequence, GenerationSequence) or not chunk.wanted:
                continue
            key = sequence.request.key
            sequence.tokens.append(0)
            num_tokens += 1
            if sequence.num_generated == 1:
                began.append(self._requests[key])
            if sequence.num_generated == sequence.task.max_tokens:
                self.batcher.finish(sequence)
                ended.append(self._requests.pop(key))
        self.batcher.took(planned, seconds)
        self._planned = None
        return StepOutcome(began, ended, num_tokens)


def _keys_of(chunk: Chunk) -> int:
    """Count the keys that a chunk's rows see together."""
    rows = len(chunk.token_ids)
    return rows * chunk.start + rows * (rows + 1) // 2
