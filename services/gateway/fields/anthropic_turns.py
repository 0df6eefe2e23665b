"""Turns of Anthropic's API as messages of a chat: results of tools are messages of their own there."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from pydantic_core import to_json

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.anthropic import (
    AnthropicBlock,
    AnthropicFields,
    AnthropicMessage,
    AnthropicText,
)

_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_Placed = tuple[str, AnthropicBlock]
Told = dict[str, Any]


def turns_of_fields(body: AnthropicFields) -> list[Told]:
    """Write a conversation as the messages of a chat.

    Raises:
        InvalidInput: a block is of a type that is not supported or does not belong to its role, lacks a field, or
            calls and results do not match.
    """
    turns: list[Told] = []
    if body.system:
        turns.append({"role": "system", "content": _content(_texts(body.system, "system"))})
    calls: set[str] = set()  # that wait for their results
    last = ""
    for role, group in groupby(enumerate(body.messages), key=lambda item: item[1].role):
        blocks = [placed for i, message in group for placed in _blocks(message, f"messages[{i}]")]
        last = blocks[-1][0] if blocks else "messages"
        if role == "assistant":
            turns.append(_assistant([block for _, block in blocks]))
            calls = _calls(blocks)
        else:
            turns += _others(role, blocks, calls)
        if role == "user":
            _check_answered(calls, last)
    _check_answered(calls, last)
    return turns


def errors_told(body: AnthropicFields) -> bool:
    """Tell if a result of a tool is an error, by a field that no chat template has."""
    return any(
        block.is_error
        for message in body.messages
        if not isinstance(message.content, str)
        for block in message.content
    )


def _calls(blocks: Sequence[_Placed]) -> set[str]:
    """Collect the ids of an assistant's calls."""
    calls: set[str] = set()
    for place, block in blocks:
        if block.type == "tool_use" and block.id:
            if block.id in calls:
                fix = "is the id of another tool_use of this turn: give each its own"
                raise InvalidInput(f"{place}.id", fix)
            calls.add(block.id)
    return calls


def _check_answered(calls: set[str], place: str) -> None:
    if calls:
        names = ", ".join(sorted(calls))[:200]
        fix = f"the message behind these tool_use blocks needs a tool_result for each: {names}"
        raise InvalidInput(place, fix)


def _blocks(message: AnthropicMessage, field: str) -> Iterator[_Placed]:
    """Give the blocks of a turn with their places."""
    if isinstance(message.content, str):
        yield (
            f"{field}.content",
            AnthropicBlock.model_validate({"type": "text", "text": message.content}),
        )
        return
    for i, block in enumerate(message.content):
        place = f"{field}.content[{i}]"
        if block.type not in _OF_ROLE[message.role]:
            allowed = ", ".join(_OF_ROLE[message.role])
            what = f"content of type {block.type[:40]!r} is not supported with role {message.role}"
            raise InvalidInput(place, f"{what}, only {allowed}", code="unsupported_parameter")
        for name in _NEEDED[block.type]:
            if getattr(block, name) is None:
                raise InvalidInput(f"{place}.{name}", f"is required in a {block.type} block")
        yield place, block


def _assistant(blocks: Sequence[AnthropicBlock]) -> Told:
    turn: Told = {"role": "assistant"}
    texts = [block.text or "" for block in blocks if block.type == "text"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    calls = [
        {
            "id": block.id,
            "function": {"name": block.name, "arguments": to_json(block.input).decode()},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    if texts or not calls:
        turn["content"] = _content(texts)
    if any(thoughts):
        turn["reasoning"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _others(role: str, blocks: Sequence[_Placed], calls: set[str]) -> Iterator[Told]:
    """Write the turns of users and systems, and take the calls that they answer out of ``calls``."""
    behind_text = False
    for is_result, group in groupby(blocks, key=lambda placed: placed[1].type == "tool_result"):
        if not is_result:
            yield {"role": role, "content": _content([block.text or "" for _, block in group])}
            behind_text = True
            continue
        for place, block in group:
            call_id = block.tool_use_id or ""
            if call_id not in calls:
                fix = "names no tool_use of the assistant's turn before it that waits for a result"
                raise InvalidInput(f"{place}.tool_use_id", fix)
            if behind_text:
                fix = "tool_result blocks come first: move it ahead of the text"
                raise InvalidInput(place, fix)
            calls.remove(call_id)
            content = _content(_texts(block.content or "", f"{place}.content"))
            yield {"role": "tool", "tool_call_id": call_id, "content": content}


def _texts(content: str | Sequence[AnthropicText], field: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for i, block in enumerate(content):
        if block.type != "text":
            what = f"content of type {block.type[:40]!r} is not supported here, only text"
            raise InvalidInput(f"{field}[{i}]", what, code="unsupported_parameter")
        if block.text is None:
            raise InvalidInput(f"{field}[{i}].text", "is required in a text block")
        texts.append(block.text)
    return texts


def _content(texts: Sequence[str]) -> str | list[Told]:
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
