"""The form in which a chat template takes messages, found by trying it.

| Part of a message | Forms |
|---|---|
| content | a text, or a list of parts |
| calls | see ``call_messages`` |

A template gets the client's own form if it can read that, as in ``transformers``.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from moesaic.models.text.call_messages import CALL_FORMS, PROBE, TOOL, CallMessages
from moesaic.models.text.program import TemplateRefusal

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of one field of messages; the first one in a message is used."""

Message = Mapping[str, Any]
_Form = Literal["text", "parts"]
_FIRST, _SECOND = "probe_first", "probe_second"
_ASKED: Message = {"role": "user", "content": "probe"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
_NO_FUNCTION: dict[str, Any] = {"description": "", "parameters": _NO_PARAMETERS}
_PYTHON = "{'type'"  # a list in Python's notation


class MessageForms:
    """The forms that one template takes. Safe to use from several threads."""

    def __init__(self, render: Callable[..., str]) -> None:
        """Take ``render``, which renders messages in the form they have."""
        self._render = render
        self._takes = functools.cache(self._found)

    @functools.cached_property
    def call_form(self) -> CallMessages:
        """The form of messages with tool calls."""
        return next((form for form in CALL_FORMS if form.fits(self._render)), CALL_FORMS[0])

    def of(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """Give messages the form that the template takes; each call in them has its arguments as a text.

        Raises:
            InvalidInput: a call's arguments are too large or too deep, or rendering takes too much.
        """
        told = [self._with_content(message, tools) for message in messages]
        return self.call_form.of(told) if any(m.get("tool_calls") for m in told) else told

    def plainest(self, messages: Sequence[Message]) -> list[Message]:
        """Put messages in the form that every template can read: each has a string as content, also beside calls."""
        return [_plain(message) for message in messages]

    def _with_content(self, message: Message, tools: bool) -> Message:
        content = message.get("content")
        if content in (None, ""):
            return message
        list_as, text_as = self._takes(message["role"], tools)
        if isinstance(content, list):
            return message if list_as == "parts" else {**message, "content": joined(content)}
        return message if text_as == "text" else {**message, "content": [_part(content)]}

    def _found(self, role: str, tools: bool) -> tuple[_Form, _Form]:
        """Find how the template takes the content of a role: as a list of parts, and as a string."""
        text = self._tried(role, _FIRST, tools)
        parts = self._tried(role, [_part(_FIRST), _part(_SECOND)], tools)
        if text is None and parts is None and role != "user":
            return self._takes("user", tools)
        text, parts = text or "", parts or _PYTHON
        if _PYTHON in parts:
            return "text", "text"
        if _FIRST not in text:
            return "parts", "parts" if _FIRST in parts else "text"
        return "parts" if _FIRST in parts and _SECOND in parts else "text", "text"

    def _tried(self, role: str, content: Any, tools: bool) -> str | None:
        """Render a conversation with a message of a role; None: the template refuses it."""
        message = {"role": role, "content": content}
        turns: list[Message] = [message, _ASKED]
        if role == "user":
            turns = [message]
        elif role == "assistant":
            turns = [_ASKED, message, _ASKED]
        elif role == "tool":
            *before, result = PROBE
            turns = [*self.call_form.of(before), {**result, "content": content}]
        kwargs = {"tools": [TOOL]} if tools else {}
        try:
            return self._render(turns, **kwargs)
        except TemplateRefusal:
            return None


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join parts to one text, each on a new line."""
    return "\n".join(part["text"] for part in parts)


def whole_tools(tools: Any) -> Any:
    """Add the optional fields of functions, for templates that read them without a check."""
    if not isinstance(tools, list):
        return tools
    return [_whole_tool(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _whole_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    told = {**_NO_FUNCTION, **{k: value for k, value in function.items() if value is not None}}
    parameters = told["parameters"]
    if isinstance(parameters, Mapping):
        told["parameters"] = {**_NO_PARAMETERS, **parameters}
    return {**tool, "function": told}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _plain(message: Message) -> Message:
    content = message.get("content") or ""
    told = {**message, "content": joined(content) if isinstance(content, list) else content}
    if told["content"] and told.get("tool_calls"):
        told.pop("thinking", None)  # the template of gpt-oss refuses both fields together
    return told
