"""Tasks for a worker, and the events that come back."""

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.errors import MoesaicError
from moesaic.v1.attention_pb2 import Failure, Finished, PromptLogprobs, Scores, Submit, Tokens

Event = PromptLogprobs | Tokens | Scores | Finished | Failure | MoesaicError
Key = tuple[str, int]  # worker id and generation: a restarted worker is another one


@dataclass(frozen=True, eq=False)
class Task:
    """One attempt of one sequence, as its worker's stream knows it."""

    submit: Submit
    placed: Callable[[Key], None]  # called once, when a worker is about to get it
    deliver: Callable[[Event], None]

    @property
    def key(self) -> tuple[str, int]:
        """Name of the task in events."""
        return self.submit.request_id, self.submit.attempt
