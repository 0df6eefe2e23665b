"""Tools of ``/v1/responses``: functions, alone or in namespaces, which a chat does not have."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.messages import MAX_TOOLS, FunctionWire

# Tools that clients offer unasked, such as Codex, and that models can do without.
_DISPENSABLE = ("web_search", "web_search_2025_08_26")


class FlatFunctionWire(FunctionWire):
    """One function, whose fields stand beside the type."""

    name: str = Field("", description="required")
    type: str = Field(max_length=64, description="function")


class FlatToolWire(FlatFunctionWire):
    """One tool: a function, or a namespace of functions."""

    type: str = Field(
        max_length=64,
        description="function or namespace; web_search is ignored, others are refused",
    )
    tools: Annotated[list[FlatFunctionWire], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions of a namespace"
    )


class Origin(NamedTuple):
    """A function, as clients know it."""

    name: str
    namespace: str | None


class Offered:
    """The functions of a body, as a chat has them.

    Attributes:
        made: the tools of the chat.
        places: the place in the body that each of them is from.
        origins: functions in namespaces, by the names that the model knows them by.
        ignored: places of what the model does not see.

    Raises:
        InvalidInput: a tool is of another type, or lacks a field.
    """

    def __init__(self, tools: Sequence[FlatToolWire]) -> None:
        self.made: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.origins: dict[str, Origin] = {}
        self.ignored: list[str] = []
        for i, tool in enumerate(tools):
            place = f"tools[{i}]"
            if tool.type in _DISPENSABLE:
                self.ignored.append(place)
            elif tool.type == "namespace":
                self._take_namespace(tool, place)
            else:
                self._take(tool, place)

    def origin(self, name: str) -> Origin:
        """Find the function that the model calls by this name."""
        return self.origins.get(name, Origin(name, None))

    def chosen(self, choice: Any) -> Any:
        """Write a ``tool_choice`` with the names that the model knows functions by.

        Raises:
            InvalidInput: a name stands for functions of several namespaces.
        """
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "function":
            return self._chosen_one(choice)
        if kind != "allowed_tools":
            return choice
        allowed = choice.get("allowed_tools", choice)
        tools = [self._chosen_one(tool) for tool in allowed["tools"]]
        return {"type": kind, "allowed_tools": {"mode": allowed["mode"], "tools": tools}}

    def _chosen_one(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        name, namespace = function["name"], function.get("namespace")
        if namespace is not None:
            return {"type": "function", "name": name_for_model(name, str(namespace))}
        if any(each["function"]["name"] == name for each in self.made):
            return {"type": "function", "name": name}
        found = [known for known, origin in self.origins.items() if origin.name == name]
        if len(found) > 1:
            fix = f"{name[:60]!r} is in {len(found)} namespaces: add the field namespace"
            raise InvalidInput("tool_choice", fix)
        return {"type": "function", "name": found[0] if found else name}

    def _take_namespace(self, tool: FlatToolWire, place: str) -> None:
        for name in ("name", "tools"):
            if not getattr(tool, name):
                raise InvalidInput(f"{place}.{name}", "is required in a namespace")
        if tool.description:
            # Chat templates have no place for it.
            self.ignored.append(f"{place}.description")
        for i, function in enumerate(tool.tools or ()):
            self._take(function, f"{place}.tools[{i}]", tool.name)

    def _take(self, tool: FlatFunctionWire, place: str, namespace: str | None = None) -> None:
        if tool.type != "function":
            allowed = "function" if namespace else "function and namespace"
            what = f"tools of type {tool.type[:40]!r} are not supported, only {allowed}"
            raise InvalidInput(f"{place}.type", what, code="unsupported_parameter")
        if not tool.name:
            raise InvalidInput(f"{place}.name", "is required")
        name = name_for_model(tool.name, namespace)
        if namespace is not None:
            self.origins[name] = Origin(tool.name, namespace)
        if getattr(tool, "tools", None) is not None:
            # Only a namespace has any.
            self.ignored.append(f"{place}.tools")
        sent = tool.model_dump(exclude_unset=True, exclude={"type", "tools"})
        self.made.append({"type": "function", "function": sent | {"name": name}})
        self.places.append(place)


def name_for_model(name: str, namespace: str | None) -> str:
    """Name a function for the model, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def described_tool(tool: FlatFunctionWire) -> dict[str, Any]:
    """Write a tool as answers repeat it."""
    told = tool.model_dump(exclude_unset=True)
    if isinstance(tool, FlatToolWire) and tool.type == "namespace":
        return told | {"tools": [described_tool(inner) for inner in tool.tools or ()]}
    if tool.type != "function":
        return told
    return told | {"parameters": tool.parameters, "strict": bool(tool.strict)}
