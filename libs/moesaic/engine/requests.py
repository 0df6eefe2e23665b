"""What the engine is asked, and what it tells."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moesaic.engine.grammar import Grammar
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
    repetition_penalty: float = 1.0  # above 1: against every token of the prompt or the answer
    presence_penalty: float = 0.0  # against every token of the answer
    frequency_penalty: float = 0.0  # the same, once for each time it occurs
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is picked; none: everything may be
    bad_words: tuple[tuple[int, ...], ...] = ()  # not in the answer, unless nothing else could be

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before count."""
        neutral = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != neutral


@dataclass(frozen=True)
class Generation:
    """Continue the prompt."""

    max_tokens: int
    min_tokens: int = 0
    num_resumed: int = 0  # tokens at the prompt's end that are the answer's, made elsewhere
    stop_token_ids: frozenset[int] = (
        frozenset()
    )  # the model's end tokens included, unless they are to be ignored
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None  # None: no log-probabilities; 0: the chosen token's only
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None  # what the answer must fit
    patience_s: float = 0.0  # so late may tokens be told, together


@dataclass(frozen=True)
class Scoring:
    """Log-probability of each candidate continuation of the prompt (MoE-Prefill section 3: no
    decode step)."""

    candidates: tuple[tuple[int, ...], ...]
    store_kv: bool | None = None  # false: keep nothing; None: as the engine does by default


@dataclass(frozen=True)
class Request:
    """One unit of work."""

    key: RequestKey
    token_ids: tuple[int, ...]
    work: Generation | Scoring
    deadline_s: float | None = None  # on the monotonic clock
    budget_ms: float = 0.0  # what the caller gave, for the error's text
    priority: int = 0  # less goes first; equals go by arrival
    cache_salt: str = ""  # only requests with the same one find each other's KV
    exact: bool = False  # never take over KV of requests that accept degraded computation
    tenant: str = ""  # who is charged with it
    part_of: str = ""  # the caller's request; empty: it is one by itself


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and of the likeliest tokens in its place, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # among all tokens, from 1


@dataclass(frozen=True)
class ProgressEvent:
    """So many of the prompt's tokens have their KV; more steps follow before the next news."""

    key: RequestKey
    computed_tokens: int


@dataclass(frozen=True)
class TokenEvent:
    """One more token of an answer; ``index`` counts from 0."""

    key: RequestKey
    index: int
    token_id: int
    logprob: TokenLogprob | None = None
    patience_s: float = 0.0  # so late may it be told


@dataclass(frozen=True)
class PromptEvent:
    """Log-probabilities of some of the prompt's tokens, from ``first_position`` on."""

    key: RequestKey
    first_position: int
    logprobs: tuple[TokenLogprob, ...]


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
    stop_token_id: int | None = None  # the answer's last token, which no TokenEvent told
    stop_logprob: TokenLogprob | None = None
    cached_tokens: int = 0  # of the prompt, whose KV was there already


@dataclass(frozen=True)
class FailureEvent:
    """The last event of a request that failed."""

    key: RequestKey
    error: MoesaicError


Event = PromptEvent | ProgressEvent | TokenEvent | ScoreEvent | FinishEvent | FailureEvent
