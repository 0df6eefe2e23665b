"""Body of ``/v1/responses``, and the chat that it asks for."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.fields.bodies import BodyPart, JsonSchema, Metadata, ResponseFormat
from moesaic.services.gateway.fields.generating import (
    MAX_TOP_LOGPROBS,
    ChatWire,
    GenerationWire,
    ReasoningEffort,
)
from moesaic.services.gateway.fields.messages import MAX_TOOLS, ChoiceFields
from moesaic.services.gateway.fields.response_items import ItemWire, Messages
from moesaic.services.gateway.fields.response_tools import FlatToolWire, Offered
from moesaic.services.gateway.http.problems import invalid_body

MAX_ITEMS = 4096
LOGPROBS = "message.output_text.logprobs"  # in include
# Fields of chats and completions that have no place here, and the ones to use instead.
_ELSEWHERE = {
    "n": "",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "prompt_logprobs": "/v1/chat/completions",
    "return_token_ids": "/v1/chat/completions",
    "return_tokens_as_token_ids": "/v1/chat/completions",
}
_SHARED = GenerationWire.model_fields.keys() - _ELSEWHERE.keys()
_TRANSLATED = re.compile(
    r"\bmessages\[(?P<turn>\d+)\]|\btools\[(?P<tool>\d+)\]|\b(messages|response_format\.json_schema|response_format|verbosity"
    r"|max_completion_tokens|reasoning_effort)\b|(?<=\])\.function(?=\.)"
)
_LEADING = re.compile(r"([\w.\[\]-]+: )+")  # fields at the beginning of an error
_NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


class TextFormatWire(JsonSchema):
    """``text.format``: what the whole answer must be."""

    type: Literal["text", "json_object", "json_schema"]


class TextWire(BodyPart):
    """``text`` of a request."""

    format: TextFormatWire | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="passed to chat templates that read it"
    )


class ReasoningWire(BodyPart):
    """``reasoning`` of a request."""

    effort: ReasoningEffort | None = Field(
        None, description="effort, if the chat template supports it; none: no reasoning"
    )


class ResponsesWire(GenerationWire, ChoiceFields):
    """Body of ``/v1/responses``."""

    input: Annotated[list[ItemWire], Field(max_length=MAX_ITEMS)] | str
    instructions: str | None = Field(None, description="goes before the input")
    previous_response_id: str | None = Field(
        None, max_length=100, description="a stored response, whose items go before the input"
    )
    store: bool | None = Field(
        None, description="false: keep nothing; default: true if the gateway has --files-dir"
    )
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    tools: Annotated[list[FlatToolWire], Field(max_length=MAX_TOOLS)] | None = None
    text: TextWire | None = None
    reasoning: ReasoningWire | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto is refused")
    include: list[Annotated[str, Field(max_length=64)]] | None = Field(
        None, max_length=64, description=f"{LOGPROBS}; others are ignored"
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer tells log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @classmethod
    def elsewhere(cls) -> Mapping[str, str]:
        """Fields of chats and completions that have no place here."""
        return _ELSEWHERE

    def objection(self) -> InvalidInput | None:
        """Find a field that has a value, but no place here."""
        for name, instead in _ELSEWHERE.items():
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                fix = f"use {instead}, or leave it out" if instead else "leave it out"
                return _unsupported(name, f"is not supported here: {fix}")
        if self.truncation == "auto":
            return _unsupported(
                "truncation", "is not supported: shorten the input, or leave it out"
            )
        try:
            _ = self.offered
        except InvalidInput as error:
            return error
        return None

    @cached_property
    def offered(self) -> Offered:
        """The functions that the model may call.

        Raises:
            InvalidInput: a tool is of another type, or lacks a field.
        """
        return Offered(self.tools or ())


def _unsupported(field: str, fix: str) -> InvalidInput:
    return InvalidInput(field, fix, code="unsupported_parameter")


class Names:
    """Names of the fields of this body, for errors that name those of the chat made from it."""

    def __init__(self, places: Sequence[str] = (), tools: Sequence[str] = ()) -> None:
        self._places, self._tools = places, tools

    def here(self, text: str) -> str:
        """Put the names of this body in a text."""

        def name(found: "re.Match[str]") -> str:
            if found["tool"] is not None:
                return dict(enumerate(self._tools)).get(int(found["tool"]), found[0])
            if found["turn"] is None:
                return _NAMES.get(found[0], "")
            return dict(enumerate(self._places)).get(int(found["turn"]), "input")

        return _TRANSLATED.sub(name, text)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have errors within the block name the fields of this body, ahead of what they quote."""
        try:
            yield
        except MoesaicError as error:
            # Of the gateway's, or a worker's
            if not isinstance(field := getattr(error, "field", None), str):
                raise
            text = str(error)
            found = _LEADING.match(text)
            end = found.end() if found else 0
            # A copy, since others may be told the same error.
            told = type(error).__new__(type(error), self.here(text[:end]) + text[end:])
            vars(told).update(vars(error), field=self.here(field))
            raise told from error


def chat_of(body: ResponsesWire, messages: Messages) -> ChatWire:
    """Make the chat that a body asks for.

    Raises:
        InvalidInput: two tools share a name, or ``tool_choice`` names several.
    """
    fields = {name: getattr(body, name) for name in _SHARED & body.model_fields_set}
    text = body.text or TextWire.model_validate({})
    if text.format is not None:
        schema = text.format if text.format.type == "json_schema" else None
        fields["response_format"] = ResponseFormat(type=text.format.type, json_schema=schema)
    if body.tools is not None:
        fields["tools"] = body.offered.made
    fields |= {
        "messages": messages.made,
        "max_completion_tokens": body.max_output_tokens,
        "tool_choice": body.offered.chosen(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": text.verbosity,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    try:
        return ChatWire.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from None
