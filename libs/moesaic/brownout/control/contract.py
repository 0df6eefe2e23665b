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
        now_s: the moment, by any monotonic clock.
        waiting_requests: requests that have no place in steps.
        waiting_tokens: prompt tokens not computed yet, those of prompts in progress included.
        oldest_wait_s: longest wait of a request that has not begun.
        answers: generations that get a token in each step.
        step_rows: most prompt rows of one step.
        places: most requests with rows in one step, at least 1.
        free_places: places that are free now.
        idle_s: time before this moment in which the engine was idle.
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
        now_s: time of its end.
        seconds: its duration.
        prompt_rows: rows of prompts.
        answer_rows: rows of generations, one for each.
        thresholds: its thresholds.
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
        at_s: time of the token.
        seconds: from submission to the first token, or between two tokens.
        share: latency as a share of the target of the request's class.
    """

    at_s: float
    seconds: float
    share: float
