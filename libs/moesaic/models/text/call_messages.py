"""Messages with tool calls, as chat templates want them: they differ in what arguments and missing texts are."""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moesaic.json_texts import JsonRoom, decode_beginning, decode_text
from moesaic.models.text.program import TemplateRefusal

# The key for arguments that are not a JSON object, if a template needs an object.
UNREAD = "arguments"
NO_ARGUMENTS = ("", "null", '""')

_NAME, _KEY, _VALUE, _ID = "probe_name", "probe_key", "probe_value", "probecall"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _NAME, "description": "probe", "parameters": _SCHEMA},
}
_CALL: dict[str, Any] = {
    "id": _ID,  # of nine letters: Mistral's templates count them
    "type": "function",
    "function": {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})},
}
PROBE: list[Mapping[str, Any]] = [
    {"role": "user", "content": "probe"},
    {"role": "assistant", "tool_calls": [_CALL]},
    {"role": "tool", "content": "probe", "tool_call_id": _ID, "name": _NAME},
]


class Content(enum.Enum):
    """The content of a message that has calls and no text."""

    AS_SENT = "an empty string or no field, as it was sent"
    LEFT_OUT = "no field"


class CallMessages(NamedTuple):
    """One form.

    Attributes:
        objects: arguments are given as objects, not as their texts.
        empty: text of a message that only calls.
    """

    objects: bool
    empty: str | Content | None

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Give messages this form; each call in them has its arguments as a text.

        Arguments may have broken off, or not be an object; the readable part is kept.

        Raises:
            InvalidInput: arguments that are to be an object are nested too deeply, or hold too much.
        """
        room = JsonRoom()
        return [
            self._message(number, message, room) if message.get("tool_calls") else message
            for number, message in enumerate(messages)
        ]

    def fits(self, render: Callable[..., str]) -> bool:
        """Test if a template writes a call unchanged in this form."""
        if self.empty is Content.AS_SENT:
            sent = (Content.LEFT_OUT, "")
            return all(CallMessages(self.objects, empty).fits(render) for empty in sent)
        try:
            text = render(self.of(PROBE), add_generation_prompt=False, tools=[TOOL])
        except TemplateRefusal:
            return False
        # An object as Python writes it, a text within a text.
        wrong = (f"{{'{_KEY}'", f'\\"{_KEY}')
        return _NAME in text and _VALUE in text and not any(part in text for part in wrong)

    def _message(
        self, number: int, message: Mapping[str, Any], room: JsonRoom
    ) -> Mapping[str, Any]:
        calls = [
            self._call(call, f"messages[{number}].tool_calls[{i}].function.arguments", room)
            for i, call in enumerate(message["tool_calls"])
        ]
        told = {**message, "tool_calls": calls}
        if message.get("content") or self.empty is Content.AS_SENT:
            return told
        told["content"] = self.empty
        if self.empty is Content.LEFT_OUT:
            del told["content"]
        return told

    def _call(self, call: Mapping[str, Any], field: str, room: JsonRoom) -> Mapping[str, Any]:
        function = call["function"]
        arguments = self._arguments(function["arguments"], field, room)
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, written: str, field: str, room: JsonRoom) -> Any:
        return _object_of(written, field, room) if self.objects else written


def _object_of(written: str, field: str, room: JsonRoom) -> dict[str, Any]:
    """Make an object of arguments: of broken JSON the readable part, else their text under ``UNREAD``."""
    if written.strip() in NO_ARGUMENTS:
        return {}
    try:
        arguments = decode_text(written, field, room)
        # An object that was encoded twice.
        if isinstance(arguments, str):
            arguments = decode_text(arguments, field, room)
    except ValueError:
        arguments = decode_beginning(written, field)
    return arguments if isinstance(arguments, dict) else {UNREAD: written}


_EMPTY: list[str | Content | None] = [Content.AS_SENT, Content.LEFT_OUT, "", None]
CALL_FORMS = [CallMessages(objects, empty) for objects in (True, False) for empty in _EMPTY]
"""All forms, the usual one first. Where a call has no text, some templates write what they are given."""
