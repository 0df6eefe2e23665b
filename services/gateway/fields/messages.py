"""Messages, tools and choices of tools: fields of ``/v1/chat/completions``."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from moesaic.errors import InvalidInput
from moesaic.models.text.chat import REASONING_FIELDS
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.services.gateway.fields.bodies import BodyPart, Bounded, TextPart, checked_texts

MAX_TOOLS = 512
MAX_CALLS = 1024  # of one turn
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NAME = re.compile(r"[\w.:/-]{1,256}")
Mode = Literal["none", "auto", "required"]
_WORDS: tuple[Mode, ...] = ("none", "auto", "required")
_FORMS = (
    'none, auto, required, {"type": "function", "function": {"name": …}}, or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


def _plain_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 256 letters, digits and characters of _-.:/")
    return name


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    mistake = _mistake_in(schema)
    if mistake:
        raise ValueError(f"is not a JSON schema of an object: {mistake}")
    return schema


FunctionName = Annotated[str, AfterValidator(_plain_name)]
ObjectSchema = Annotated[dict[str, Any], AfterValidator(_object_schema)]


class FunctionWire(BodyPart):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: ObjectSchema | None = Field(None, description="JSON schema of an object")
    strict: bool | None = Field(None, description="calls always fit the schema")


class ToolWire(BodyPart):
    """One tool: a function."""

    type: Literal["function"]
    function: FunctionWire
    _sent: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_what_was_sent(cls, sent: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(sent)
        tool._sent = sent if isinstance(sent, Mapping) else tool.model_dump(exclude_unset=True)
        return tool

    @property
    def known(self) -> ToolFunction:
        """The function, for the dialect."""
        wire = self.function
        return ToolFunction(wire.name, wire.parameters or NO_PARAMETERS, bool(wire.strict))

    def for_template(self) -> Mapping[str, Any]:
        """Return the tool as it was sent, with custom fields and in its order, as ``transformers`` does."""
        return self._sent


def _names_differ(tools: list[ToolWire]) -> list[ToolWire]:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in seen:
            raise ValueError(f"tools[{i}].function.name: {tool.function.name!r} appears twice")
        seen.add(tool.function.name)
    return tools


Tools = Annotated[list[ToolWire], Field(max_length=MAX_TOOLS), AfterValidator(_names_differ)]


def _object_of(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


_FUNCTION = _object_of(
    type={"const": "function"}, function=_object_of(name={"type": "string", "minLength": 1})
)
_ALLOWED = _object_of(
    type={"const": "allowed_tools"},
    allowed_tools=_object_of(
        mode={"enum": ["auto", "required"]},
        tools={"type": "array", "items": _FUNCTION, "minItems": 1},
    ),
)


@dataclass(frozen=True)
class ToolChoice:
    """Calls that a chat allows.

    Attributes:
        mode: none: no call; auto: the model decides; required: at least one call.
        names: functions that may be called; empty: all of the chat.
        once: one call at most.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    once: bool = False


class ChoiceFields(Bounded):
    """Fields that say which tools may be called."""

    model_config = ConfigDict(extra="allow", strict=True)

    tool_choice: Any = Field(
        None,
        json_schema_extra={
            "anyOf": [
                {"enum": list(_WORDS), "type": "string"},
                _FUNCTION,
                _ALLOWED,
                {"type": "null"},
            ]
        },
        description="none, auto, required, the function to call, or the tools that may be called; "
        "default: auto if there are tools",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    @field_validator("tool_choice")
    @classmethod
    def _choice_is_known(cls, choice: Any) -> Any:
        choice_of(choice)
        return choice


class ToolFields(ChoiceFields):
    """Fields of a chat that concern tools."""

    tools: Tools | None = None


def choice_of(choice: Any) -> ToolChoice:
    """Read a ``tool_choice``. The flatter forms of OpenAI's Responses API are accepted too.

    Raises:
        ValueError: it has none of the forms.
    """
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str) and choice in _WORDS:
        return ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return ToolChoice("required", (_name_of(choice),), once=True)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if isinstance(tools, list) and tools and allowed.get("mode") in ("auto", "required"):
            return ToolChoice(allowed["mode"], tuple(dict.fromkeys(map(_name_of, tools))))
    raise ValueError(f"must be {_FORMS}")


def _name_of(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not (isinstance(name, str) and name and tool.get("type") == "function"):
        raise ValueError(f"must be {_FORMS}")
    return name


def _mistake_in(schema: dict[str, Any]) -> str:
    """Find what cannot be in the schema of an object; workers check the rest where calls are bound to it."""
    kinds = schema.get("type") or "object"
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return f"type is {str(kinds)[:40]!r}, not 'object'"
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict):
        return "properties must be an object"
    for name, inner in properties.items():
        if not isinstance(inner, (dict, bool)):
            return f"properties.{name[:60]} must be a schema"
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required must be a list of names"
    return ""


class CalledFunction(BodyPart):
    """The function of a call, and its arguments as the model wrote them."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str = "{}"


class ToolCallWire(BodyPart):
    """A call that the assistant made."""

    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BodyPart):
    """One turn of a conversation."""

    role: str = Field(
        max_length=64,
        description=f"{', '.join(_ROLES)}, or another role that the chat template names",
    )
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCallWire], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning: str | None = Field(None, description="of an assistant's turn; for templates")
    reasoning_content: str | None = Field(None, description="the same")
    thinking: str | None = Field(None, description="the same")

    def for_template(self, field: str, words: Collection[str] = ()) -> dict[str, Any]:
        """Write the turn as chat templates take it.

        Args:
            field: its place in the request, for errors.
            words: fields and strings that the template names, such as custom roles. If it does not name the role
                developer, such messages become system messages.

        Raises:
            InvalidInput: the turn has content other than text, a field that its role does not have, or an unknown role.
        """
        if self.role == "function":
            fix = "functions are not supported: use tools, and a message with role tool"
            raise InvalidInput(f"{field}.role", fix, code="unsupported_parameter")
        if self.role not in _ROLES and self.role not in words:
            fix = f"must be one of {', '.join(_ROLES)}, or a role that the chat template names"
            raise InvalidInput(f"{field}.role", fix)
        if self.tool_calls and self.role != "assistant":
            raise InvalidInput(f"{field}.tool_calls", "belong to messages with role assistant")
        instructs = self.role == "developer" and "developer" not in words
        turn: dict[str, Any] = {"role": "system" if instructs else self.role}
        if self.content is not None:
            texts = checked_texts(self.content, f"{field}.content")
            if not isinstance(texts, str):
                turn["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                turn["content"] = texts
        if self.role == "assistant":
            turn |= self._calls_and_reasoning()
        if self.role == "tool" and self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn | (self.model_extra or {})

    def _calls_and_reasoning(self) -> dict[str, Any]:
        turn: dict[str, Any] = {}
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        for name in REASONING_FIELDS:
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        return turn


def turns_of(messages: Sequence[Message], words: Collection[str] = ()) -> list[dict[str, Any]]:
    """Write a conversation as chat templates take it.

    Args:
        messages: the turns.
        words: fields and strings that the template names.

    Raises:
        InvalidInput: a turn has content other than text, a field that its role does not have, or an unknown role.
    """
    return [message.for_template(f"messages[{i}]", words) for i, message in enumerate(messages)]
