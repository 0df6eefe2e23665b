"""Requests to the engine, and the events that it tells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moesaic.engine.sequences.grammar import Grammar
from moesaic.errors import MoesaicError

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]


class RequestKey(NamedTuple):
    """The name of a request in events and cancellations. Ids are unique within their stream."""

    request_id: str
    attempt: int = 0
    stream: int = 0


@dataclass(frozen=True)
class Sampling:
    """Rules for picking the next token. The n-th of an answer depends on ``seed`` and ``n`` only."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # above 1: against every token of the prompt or the answer
    presence_penalty: float = 0.0  # against every token of the answer
    frequency_penalty: float = 0.0  # the same, once for each time it occurs
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # no other token is picked; empty: any may be
    bad_words: tuple[tuple[int, ...], ...] = ()  # not in the answer, unless nothing else is left

    @property
    def penalises(self) -> bool:
        """True if a token's earlier occurrences count."""
        neutral = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != neutral


@dataclass(frozen=True)
class GenerationTask:
    """A prompt to continue."""

    max_tokens: int
    min_tokens: int = 0
    num_resumed: int = 0  # tokens at the prompt's end that belong to the answer, made elsewhere
    # The model's end tokens are among them, unless they are to be ignored.
    stop_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None  # None: no log-probabilities; 0: the chosen token's only
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None  # that the answer must fit
    patience_s: float = 0.0  # tokens may be told this late, several together


@dataclass(frozen=True)
class ScoringTask:
    """A prompt that is only read (MoE-Prefill section 3: no decode step).

    Asked are log-probabilities of candidate continuations; or, with ``pooling`` and no candidates, outputs of
    the final norm: that of the last token, or the mean of all.
    """

    candidates: tuple[tuple[int, ...], ...] = ()
    store_kv: bool | None = None  # false: keep nothing; None: as the engine does by default
    pooling: Pooling | None = None


@dataclass(frozen=True)
class Request:
    """One prompt and its task."""

    key: RequestKey
    token_ids: tuple[int, ...]
    task: GenerationTask | ScoringTask
    deadline_s: float | None = None  # on the monotonic clock
    budget_ms: float = 0.0  # as the caller gave it, for the error's text
    priority: int = 0  # less goes first; equals go by arrival
    cache_salt: str = ""  # only requests with the same one find each other's KV
    min_threshold: float = 0.0  # share of choices whose own experts serve, at least; 1: exact
    tenant: str = ""  # charged with it
    part_of: str = ""  # id of the caller's request; empty: this one alone
    traceparent: str = ""  # W3C: the span that waits for it; empty: it is not traced

    @property
    def exact(self) -> bool:
        """True if nothing of it may be degraded."""
        return self.min_threshold >= 1


def named(requests: Iterable[Request]) -> dict[str, list[str]]:
    """Name requests in a line of the log, and their traces."""
    found = list(requests)
    names = {"request_ids": [request.key.request_id for request in found]}
    if traces := [each.traceparent.split("-")[1] for each in found if each.traceparent]:
        names["trace_ids"] = traces
    return names


@dataclass(frozen=True)
class Degradation:
    """The part of a request's work that was degraded.

    Attributes:
        mean_threshold: that its rows were promised, on average; 1: everything.
        share: of the choices of experts, over rows and layers, that their own experts did not serve.
        rows: that were computed.
    """

    mean_threshold: float = 1.0
    share: float = 0.0
    rows: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, and those of the likeliest in its place, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # among all tokens, from 1


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of a prompt: so many of its tokens have their KV, and more steps follow."""

    key: RequestKey
    computed_tokens: int


@dataclass(frozen=True)
class TokenEvent:
    """One more token of an answer; ``index`` counts from 0."""

    key: RequestKey
    index: int
    token_id: int
    logprob: TokenLogprob | None = None
    patience_s: float = 0.0  # it may be told this late
    degradation: Degradation | None = None  # of all work so far; None: as told before, or nothing


@dataclass(frozen=True)
class PromptEvent:
    """Log-probabilities of some of the prompt's tokens, from ``first_position`` on."""

    key: RequestKey
    first_position: int
    logprobs: tuple[TokenLogprob, ...]
    degradation: Degradation = Degradation()  # of all work so far


@dataclass(frozen=True)
class ScoreEvent:
    """The summed log-probability of every candidate, in the order asked."""

    key: RequestKey
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class PooledEvent:
    """The vector of a prompt, as many numbers as hidden states have."""

    key: RequestKey
    values: tuple[float, ...]


@dataclass(frozen=True)
class FinishEvent:
    """The last event of a request that succeeded."""

    key: RequestKey
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    epochs: tuple[tuple[int, int], ...]  # (epoch, tokens computed under it), in order
    stop_token_id: int | None = None  # the answer's last token, which has no TokenEvent
    stop_logprob: TokenLogprob | None = None
    cached_tokens: int = 0  # tokens of the prompt whose KV was there already
    degradation: Degradation = Degradation()


@dataclass(frozen=True)
class FailureEvent:
    """The last event of a request that failed."""

    key: RequestKey
    error: MoesaicError


Event = (
    PromptEvent | ProgressEvent | TokenEvent | ScoreEvent | PooledEvent | FinishEvent | FailureEvent
)
