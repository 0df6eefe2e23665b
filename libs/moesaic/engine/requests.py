"""What the engine is asked, and what it tells."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moesaic.errors import MoesaicError

FinishReason = Literal["stop", "length"]


class RequestKey(NamedTuple):
    """Names a request in events and cancellations. Ids are unique within the stream they came
    by."""

    request_id: str
    attempt: int = 0
    stream: int = 0


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked. The n-th token of an answer depends on ``seed`` and ``n``
    only."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """Continue the prompt."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = (
        frozenset()
    )  # the model's end tokens included, unless they are to be ignored
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None  # None: no log-probabilities; 0: the chosen token's only


@dataclass(frozen=True)
class Scoring:
    """Log-probability of each candidate continuation of the prompt (MoE-Prefill section 3: no
    decode step)."""

    candidates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Request:
    """One unit of work."""

    key: RequestKey
    token_ids: tuple[int, ...]
    work: Generation | Scoring
    deadline_s: float | None = None  # on the monotonic clock
    budget_ms: float = 0.0  # what the caller gave, for the error's text


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a chosen token, and of the likeliest tokens in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One more token of an answer; ``index`` counts from 0."""

    key: RequestKey
    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class ScoreEvent:
    """The summed log-probability of every candidate, in the order asked."""

    key: RequestKey
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a request that succeeded."""

    key: RequestKey
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    epochs: tuple[tuple[int, int], ...]  # (epoch, tokens computed under it), in order
    stop_token_id: int | None = None


@dataclass(frozen=True)
class FailureEvent:
    """The last event of a request that failed."""

    key: RequestKey
    error: MoesaicError


Event = TokenEvent | ScoreEvent | FinishEvent | FailureEvent
