"""Answers of ``/v1/messages``, whole and as events; the type of each object is its tag."""

from typing import Any

import msgspec

from moesaic.services.gateway.replies.accounts import Provenance, Usage


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Tokens that a request took: those of the prompt that were not computed before, and the others apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # nothing is kept for longer by request
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    service_tier: str = "standard"


def usage_as_anthropic(usage: Usage) -> AnthropicUsage:
    """Count tokens as Anthropic does."""
    cached = usage.prompt_tokens_details["cached_tokens"]
    told = AnthropicUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
    if isinstance(usage.completion_tokens_details, dict):
        thinking = usage.completion_tokens_details["reasoning_tokens"]
        told.output_tokens_details = {"thinking_tokens": thinking}
    return told


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning before an answer; it needs no signature here."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model makes."""

    id: str
    name: str
    input: dict[str, Any] = {}


ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageReply(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """Answer of ``/v1/messages``."""

    id: str
    role: str = "assistant"
    model: str
    content: list[ReplyBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    moesaic: Provenance | msgspec.UnsetType = msgspec.UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The beginning of a stream: the message without content."""

    message: MessageReply


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """The beginning of a block, without its content."""

    index: int
    content_block: ReplyBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, before its end."""

    signature: str = ""


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments, as text."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The end of a block."""

    index: int


class StopFields(msgspec.Struct):
    """The end of a message."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The end of a message, and all tokens that it took."""

    delta: StopFields
    usage: AnthropicUsage
    moesaic: Provenance


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event of a complete answer."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """An event in silence."""


class TokenCount(msgspec.Struct):
    """Answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
)
