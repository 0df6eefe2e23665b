"""Tools of a chat, and the choice among them."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.services.gateway.fields.bounded import Bounded
from moesaic.services.gateway.fields.formats import BodyPart

MAX_TOOLS = 512
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NAME = re.compile(r"[\w.:/-]{1,256}")


class FunctionWire(BodyPart):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object")
    strict: bool | None = Field(None, description="calls always fit the schema")

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("must be 1 to 256 letters, digits and characters of _-.:/")
        return name

    @field_validator("parameters")
    @classmethod
    def _parameters_are_a_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        mistake = _mistake_in(schema or {})
        if mistake:
            raise ValueError(f"is no JSON schema of an object: {mistake}")
        return schema


class ToolWire(BodyPart):
    """One tool: a function."""

    type: Literal["function"]
    function: FunctionWire

    @property
    def known(self) -> ToolFunction:
        """The function, for the dialect."""
        wire = self.function
        return ToolFunction(wire.name, wire.parameters or NO_PARAMETERS, bool(wire.strict))

    def for_template(self) -> dict[str, Any]:
        """Write the tool as chat templates take it."""
        wire = self.function
        told = {"name": wire.name, "description": wire.description}
        function: dict[str, Any] = {k: value for k, value in told.items() if value is not None}
        function["parameters"] = wire.parameters or NO_PARAMETERS
        return {"type": "function", "function": function}


def _names_differ(tools: list[ToolWire]) -> list[ToolWire]:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.function.name in seen:
            raise ValueError(f"tools[{i}].function.name: {tool.function.name!r} is there twice")
        seen.add(tool.function.name)
    return tools


Tools = Annotated[list[ToolWire], Field(max_length=MAX_TOOLS), AfterValidator(_names_differ)]
_NAMED: Any = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_WORDS = ("none", "auto", "required")


class ToolFields(Bounded):
    """Fields of a chat that concern tools."""

    model_config = ConfigDict(extra="allow", strict=True)

    tools: Tools | None = None
    tool_choice: Any = Field(
        None,
        json_schema_extra={
            "anyOf": [{"enum": list(_WORDS), "type": "string"}, _NAMED, {"type": "null"}]
        },
        description="none, auto, required, or the function to call; auto where there are tools",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    @field_validator("tool_choice")
    @classmethod
    def _choice_is_known(cls, choice: Any) -> Any:
        if choice is None or choice in _WORDS or _named(choice):
            return choice
        form = '{"type": "function", "function": {"name": …}}'
        raise ValueError(f"must be none, auto, required, or {form}")

    @property
    def chosen(self) -> str | None:
        """Name of the one function that is to be called, if the choice names one."""
        return _named(self.tool_choice)


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _mistake_in(schema: dict[str, Any]) -> str:
    """Find what cannot be in the schema of an object; workers check the rest where calls are bound to it."""
    if schema.get("type", "object") != "object":
        return f"type is {str(schema['type'])[:40]!r}, not 'object'"
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return "properties must be an object"
    for name, inner in properties.items():
        if not isinstance(inner, (dict, bool)):
            return f"properties.{name[:60]} must be a schema"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required must be a list of names"
    return ""
