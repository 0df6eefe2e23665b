"""Requests of Anthropic's API as chats."""

from typing import Any, NamedTuple

from pydantic import ValidationError

from moesaic.errors import InvalidInput
from moesaic.models.text.dialects.thinking import SWITCHES
from moesaic.services.gateway.fields.anthropic import (
    AnthropicFields,
    AnthropicTool,
    AnthropicToolChoice,
    MessagesWire,
)
from moesaic.services.gateway.fields.anthropic_turns import errors_told, turns_of_fields
from moesaic.services.gateway.fields.bodies import InferenceWire
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.http.problems import invalid_body
from moesaic.services.gateway.language import Language

_MODES = {"auto": "auto", "any": "required", "none": "none"}


class TranslatedChat(NamedTuple):
    """A request as a chat, and the fields of it that change nothing there."""

    chat: ChatWire
    ignored: list[str]


def chat_of(body: AnthropicFields, language: Language) -> TranslatedChat:
    """Write a request as a chat.

    Raises:
        InvalidInput: a field cannot be honoured.
    """
    thinking = body.thinking
    switches, ignored = _switches_of(body, language)
    if errors_told(body):
        ignored.append("messages.content.is_error")
    continues = body.messages[-1].role == "assistant"
    told: dict[str, Any] = {
        "messages": turns_of_fields(body),
        "tools": [_tool(tool) for tool in body.tools] if body.tools is not None else None,
        "chat_template_kwargs": switches or None,
        "include_reasoning": thinking is None or thinking.type != "disabled",
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        **_choice(body.tool_choice),
        **_output(body),
        **(_generation(body) if isinstance(body, MessagesWire) else {}),
    }
    try:
        return TranslatedChat(ChatWire.model_validate(told), ignored)
    except ValidationError as error:
        raise invalid_body(error) from error


def _generation(body: MessagesWire) -> dict[str, Any]:
    for name in body.chat_fields:
        instead = body.elsewhere()[name]
        fix = (
            f"is a field of /v1/chat/completions: {f'use {instead}' if instead else 'leave it out'}"
        )
        raise InvalidInput(name[:100], fix, code="unsupported_parameter")
    same = (*InferenceWire.model_fields, "max_tokens", "temperature", "top_p", "top_k")
    fields = {name: getattr(body, name) for name in same}
    return {**fields, "stop": body.stop_sequences, "stream": bool(body.stream)}


def _switches_of(body: AnthropicFields, language: Language) -> tuple[dict[str, bool], list[str]]:
    """Turn reasoning on or off, as far as the chat template can; name what has no effect."""
    thinking, ignored = body.thinking, list[str]()
    if thinking is None:
        return {}, ignored
    if thinking.budget_tokens is not None:
        ignored.append("thinking.budget_tokens")
    on = thinking.type != "disabled"
    switches = {name: on for name in SWITCHES if language.takes(name)}
    if not switches and on != language.dialect.thinks:
        ignored.append("thinking")
    return switches, ignored


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    told = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": told | (tool.model_extra or {})}


def _choice(choice: AnthropicToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if choice.type == "tool":
        named = {"type": "function", "function": {"name": choice.name}}
        mode: Any = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named]},
        }
    else:
        mode = _MODES[choice.type]
    return {"tool_choice": mode, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _output(body: AnthropicFields) -> dict[str, Any]:
    output = body.output_config
    if output is None:
        return {}
    told: dict[str, Any] = {"reasoning_effort": output.effort}
    if output.format is not None:
        schema = {"schema": output.format.schema_}
        told["response_format"] = {"type": "json_schema", "json_schema": schema}
    return told
