"""Items of ``/v1/responses``: what its ``input`` is made of, and the chat's messages that they become."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import BodyPart, TextPart
from moesaic.services.gateway.fields.messages import (
    MAX_CALLS,
    CalledFunction,
    Message,
    ToolCallWire,
)
from moesaic.services.gateway.fields.response_tools import name_for_model

Name = str  # of a place in the body, for errors
_SPEAKERS = ("user", "assistant", "system", "developer")
_INSTRUCTING = ("system", "developer")
_INPUT_TEXT, _OUTPUT_TEXT = "input_text", "output_text"
_LISTED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "namespace", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ContentWire(TextPart):
    """A part of a text. The last two fields are those of answers that come back, and change nothing."""

    annotations: Any = None
    logprobs: Any = None


Content = str | list[ContentWire]


class ItemWire(BodyPart):
    """One item. Each type has some of these fields; the one without a type is a message."""

    type: str | None = Field(
        None,
        max_length=64,
        description="message, function_call, function_call_output, reasoning, or item_reference; "
        "others are refused",
    )
    id: str | None = Field(None, max_length=128)
    status: str | None = Field(None, max_length=32)
    role: str | None = Field(None, max_length=64, description=", ".join(_SPEAKERS))
    content: Content | None = None
    call_id: str | None = Field(None, max_length=256)
    namespace: str | None = Field(None, max_length=256, description="of the function called")
    name: str | None = Field(None, max_length=256)
    arguments: str | None = None
    output: Content | None = None
    summary: list[TextPart] | None = None

    @property
    def kind(self) -> str:
        """The type, also where it is left out."""
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.id is not None else "message"


class Messages:
    """A chat's messages, made of items. A model's turn may be several: its reasoning, its words, its calls.

    Attributes:
        made: the messages.
        places: the place in the body that each of them is from.
    """

    def __init__(self, instructions: str | None) -> None:
        self.made: list[Message] = []
        self.places: list[Name] = []
        self._called: set[str] = set()
        if instructions is not None:
            self._add("instructions", role="system", content=instructions)

    def take(self, item: ItemWire, place: Name) -> None:
        """Add an item.

        Raises:
            InvalidInput: it is of another type, or a field is missing.
        """
        kind = item.kind
        if kind == "message":
            self._take_message(item, place)
        elif kind == "function_call":
            self._take_call(item, place)
        elif kind == "function_call_output":
            self._take_output(item, place)
        elif kind == "reasoning":
            told = item.content or item.summary or []
            self._add(place, role="assistant", reasoning=_text_of(told))
        else:
            what = f"items of type {kind[:40]!r} are not supported, only messages, function calls with their outputs"
            fix = f"{what}, reasoning, and references"
            raise InvalidInput(f"{place}.type", fix, code="unsupported_parameter")

    def _take_message(self, item: ItemWire, place: Name) -> None:
        if item.role not in _SPEAKERS:
            raise InvalidInput(f"{place}.role", f"must be one of {', '.join(_SPEAKERS)}")
        content = _needed(item.content, f"{place}.content")
        if isinstance(content, list) and len(content) == 1 and content[0].text is not None:
            # Most templates want a text.
            content = content[0].text if content[0].type in (_INPUT_TEXT, _OUTPUT_TEXT) else content
        last = self._turn
        begun = last is not None and last.content is None and not last.tool_calls
        if item.role == "assistant" and last is not None and begun:
            last.content = _as_parts(content)
            return
        if item.role in _INSTRUCTING and self._goes_on_instructing(content):
            return
        self._add(place, role=item.role, content=_as_parts(content))

    def _goes_on_instructing(self, content: Content) -> bool:
        """Join instructions to those before them: many templates read only the first message of them."""
        if len(self.made) != 1 or self.made[0].role not in _INSTRUCTING:
            return False
        before, more = _texts_of(self.made[0].content or ""), _texts_of(content)
        if before is None or more is None:
            return False
        self.made[0].content = "\n\n".join(("\n".join(before), "\n".join(more)))
        return True

    def _take_call(self, item: ItemWire, place: Name) -> None:
        call_id = _needed(item.call_id, f"{place}.call_id")
        name = _needed(item.name, f"{place}.name")
        arguments = _needed(item.arguments, f"{place}.arguments")
        function = CalledFunction.model_construct(
            name=name_for_model(name, item.namespace), arguments=arguments
        )
        call = ToolCallWire(id=call_id, function=function)
        self._called.add(call_id)
        last = self._turn
        if last is None or last.tool_calls is None:
            last = last or self._add(place, role="assistant")
            last.tool_calls = []
        if len(last.tool_calls) == MAX_CALLS:
            raise InvalidInput(place, f"a turn of the model has {MAX_CALLS} function calls at most")
        last.tool_calls.append(call)

    def _take_output(self, item: ItemWire, place: Name) -> None:
        call_id = _needed(item.call_id, f"{place}.call_id")
        output = _needed(item.output, f"{place}.output")
        if call_id not in self._called:
            fix = f"no function_call before it has the call_id {call_id[:100]!r}"
            raise InvalidInput(f"{place}.call_id", f"{fix}: send that item too")
        self._add(place, role="tool", content=_as_parts(output), tool_call_id=call_id)

    @property
    def _turn(self) -> Message | None:
        """The model's turn that is still being told, if the last message is one."""
        return self.made[-1] if self.made and self.made[-1].role == "assistant" else None

    def _add(self, place: Name, **fields: Any) -> Message:
        self.made.append(message := Message.model_validate(fields))
        self.places.append(place)
        return message


def _needed(value: Any, place: Name) -> Any:
    if value is None or (value == "" and place.endswith(("_id", "name"))):
        raise InvalidInput(place, "is required for this type of item")
    return value


def _as_parts(content: Content) -> str | list[TextPart]:
    return content if isinstance(content, str) else list(content)


def _text_of(parts: str | Sequence[TextPart]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)


def _texts_of(content: str | Sequence[TextPart]) -> list[str] | None:
    """Give the texts of a content; None: it has other parts too."""
    if isinstance(content, str):
        return [content]
    kinds = ("text", _INPUT_TEXT)
    texts = [part.text for part in content if part.type in kinds and part.text is not None]
    return texts if len(texts) == len(content) else None


def items_of(given: str | Sequence[ItemWire]) -> list[ItemWire]:
    """Give the input as items."""
    if isinstance(given, str):
        return [ItemWire.model_validate({"role": "user", "content": given})]
    return list(given)


class NewId:
    """Makes the ids of a response's items, from which the response is found."""

    def __init__(self, response_id: str) -> None:
        self._response, self._count = response_id.rpartition("_")[2], 0

    def __call__(self, kind: str) -> str:
        """Make the next one, of an item of this type."""
        self._count += 1
        return f"{_PREFIXES.get(kind, 'msg')}_{self._response}{self._count:04x}"


def listed(item: ItemWire, new_id: NewId) -> dict[str, Any]:
    """Write an item as it is listed: with an id, its text as parts, and nothing that its type has no use for."""
    kind = item.kind
    text = _OUTPUT_TEXT if item.role == "assistant" else _INPUT_TEXT
    out: dict[str, Any] = {"type": kind, "id": item.id or new_id(kind)}
    for name in _LISTED[kind]:
        value = getattr(item, name)
        if isinstance(value, str) and name == "content" and kind == "message":
            value = [ContentWire.model_validate({"type": text, "text": value})]
        if isinstance(value, list):
            value = [_listed_part(part) for part in value]
        if value is not None:
            out[name] = value
    if kind == "reasoning":
        out.setdefault("summary", [])
    return out | {"status": item.status or "completed"}


def _listed_part(part: TextPart) -> dict[str, Any]:
    out: dict[str, Any] = {"type": part.type}
    if part.text is not None:
        out["text"] = part.text
    return out | ({"annotations": []} if part.type == _OUTPUT_TEXT else {})
