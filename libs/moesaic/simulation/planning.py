"""The form of a worker's planner: requests in, rows of the next step out. The engine's own batcher fits it."""

from typing import NamedTuple, Protocol


class SimulatedRequest:
    """One request on its way through a fleet.

    Attributes:
        number: in its trace, from 0.
        prompt_tokens: of the prompt.
        answer_tokens: that it will get, at least 1.
        cached_tokens: of the prompt, that need not be computed.
        worker: that has it; -1: none yet.
    """

    __slots__ = ("answer_tokens", "cached_tokens", "number", "prompt_tokens", "worker")

    def __init__(
        self, number: int, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0
    ) -> None:
        self.number = number
        self.prompt_tokens, self.answer_tokens = prompt_tokens, answer_tokens
        self.cached_tokens, self.worker = cached_tokens, -1


class PlannedRows(NamedTuple):
    """Rows of the next step; see ``StepRows``.

    Attributes:
        prompt_rows: tokens of prompts.
        answer_rows: generations that get a token.
        keys: that the rows of answers see together.
        prompt_keys: that those of prompts see together.
        most_steps: steps that would be alike unless a request comes, but for one more key a row in each; only
            answers have rows in them if there are several.
    """

    prompt_rows: int
    answer_rows: int
    keys: float
    prompt_keys: float = 0.0
    most_steps: int = 1


class StepOutcome(NamedTuple):
    """Requests that a step, or a run of alike ones, has moved on.

    Attributes:
        began: have their first token since the last step.
        ended: have all their tokens since the last step, which may be their first too.
        num_tokens: of answers, of all requests and steps.
    """

    began: list[SimulatedRequest]
    ended: list[SimulatedRequest]
    num_tokens: int


class StepPlanner(Protocol):
    """Plans the steps of one attention worker."""

    @property
    def num_open(self) -> int:
        """Number of requests that have come and not ended."""
        ...

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request.

        Raises:
            MoesaicError: it can never run here, or there is no place for it.
        """
        ...

    def next_step(self) -> PlannedRows | None:
        """Plan the next step; None: there is nothing to compute."""
        ...

    def took(self, num_steps: int, seconds: float) -> StepOutcome:
        """Take note that the planned step, or so many alike ones, took these seconds together."""
        ...
