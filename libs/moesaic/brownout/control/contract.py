"""Observations that the control of brownout is given, and the thresholds it answers with. Pure."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Thresholds(NamedTuple):
    """Shares of choices whose own experts stay, 0 to 1, by phase; 1 promises every expert."""

    prefill: float = 1.0
    decode: float = 1.0


EXACT = Thresholds()


@dataclass(frozen=True)
class QueueState:
    """The work of an engine at one moment.

    Attributes:
        now_s: the moment, on any clock that does not go back.
        waiting_requests: that have no place in steps.
        waiting_tokens: of prompts, not computed yet; those of prompts under way too.
        oldest_wait_s: of the requests that have not begun.
        answers: generations that get a token in each step.
        step_rows: rows of prompts that one step may have.
        places: requests that a step may have rows of, at least 1.
        free_places: of these.
        idle_s: that the engine had nothing to do for, before this moment.
    """

    now_s: float
    waiting_requests: int = 0
    waiting_tokens: int = 0
    oldest_wait_s: float = 0.0
    answers: int = 0
    step_rows: int = 2048
    places: int = 128
    free_places: int = 128
    idle_s: float = 0.0


@dataclass(frozen=True)
class StepTaken:
    """One step that was computed.

    Attributes:
        now_s: its end.
        seconds: it took.
        prompt_rows: rows of prompts.
        answer_rows: rows of generations, one for each.
        thresholds: that it ran at.
    """

    now_s: float
    seconds: float
    prompt_rows: int
    answer_rows: int
    thresholds: Thresholds = EXACT


@dataclass(frozen=True)
class Latency:
    """The latency of one token.

    Attributes:
        at_s: the token's time.
        seconds: to the first token from submission, or from one token to the next.
        share: of the target of the request's class.
    """

    at_s: float
    seconds: float
    share: float
