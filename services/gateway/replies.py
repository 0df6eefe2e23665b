"""What callers get: the shapes of the answers. Fields that are at their default are left out where clients allow it."""

from typing import Any, Literal

import msgspec
from starlette.responses import Response


class Usage(msgspec.Struct):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Usage with its total."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, {"cached_tokens": cached_tokens})


class EpochTokens(msgspec.Struct):
    """Tokens computed under one placement."""

    epoch: int
    tokens: int


class Provenance(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The ``moesaic`` object of an answer.

    Attributes:
        epochs: tokens under each placement. A worker tells them when it finishes: an answer that a stop string cut
            short is not among them, and the field is absent when nothing is known.
        cached_tokens: prompt tokens that workers had already, likewise as far as they told.
        workers: who computed it, if asked for.
        prompt_version: of the words that questions were put in; with others the numbers would differ.
    """

    epochs: list[EpochTokens] = []
    cached_tokens: int
    workers: list[str] | None = None
    prompt_version: str | None = None


class TokenEntry(msgspec.Struct):
    """One token in a chat's log-probabilities."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenEntry):
    """The token that was picked, beside the likeliest ones."""

    top_logprobs: list[TokenEntry]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's answer."""

    content: list[ChosenToken]
    refusal: None = None


class PromptToken(msgspec.Struct):
    """One of the tokens that a prompt has, or might have, at one place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""By position, then by token id; nothing is known of the first position."""


class ChatMessage(msgspec.Struct):
    """The assistant's turn."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the assistant's turn."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One answer's share of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a plain completion."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer of a plain completion, or its share of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Envelope(msgspec.Struct, kw_only=True):
    """An answer or a chunk of one, around its choices, whose type the kinds below tell."""

    id: str
    object: str = ""
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    moesaic: Provenance | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Envelope, kw_only=True):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(Envelope, kw_only=True):
    """One event of a streamed answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Completion(Envelope, kw_only=True):
    """Answer of ``/v1/completions``, or one event of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ClassifiedLabel(msgspec.Struct, omit_defaults=True):
    """One label with its log-probability and its share among the labels; where each label is a question of its own
    (``multi``), those of yes, and the probability of yes and no together."""

    label: str
    logprob: float
    prob: float
    label_mass: float | None = None


class ClassifiedText(msgspec.Struct):
    """The answer for one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    labels: list[ClassifiedLabel]
    label_mass: float


class Classified(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/classify``."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ClassifiedText]
    usage: Usage
    method: str
    moesaic: Provenance


def reply(body: Any) -> Response:
    """A successful answer."""
    return Response(msgspec.json.encode(body), media_type="application/json")
