"""Answers of the routes that generate text. Fields at their default are left out where clients allow it."""

from typing import Any, Literal

import msgspec

from moesaic.services.gateway.replies.accounts import Provenance, Usage


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


class CalledFunctionReply(msgspec.Struct, omit_defaults=True):
    """The function of a call; in a chunk more of its arguments, and the name in the first one alone."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: CalledFunctionReply
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """Addition of a chunk to one of the calls."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: CalledFunctionReply | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's turn. Its reasoning has two names: vLLM's, and that of DeepSeek's API and SGLang."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """Addition of a chunk to the assistant's turn."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


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
