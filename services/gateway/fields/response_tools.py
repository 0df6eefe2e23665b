"""Tools of ``/v1/responses``: functions, alone or in namespaces, which a chat does not have."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.messages import MAX_TOOLS, FunctionWire

# Tools that clients offer unasked, such as Codex, and that models can do without.
_DISPENSABLE = ("web_search", "web_search_2025_08_26")


class FlatToolWire(FunctionWire):
    """One tool: a function, or a namespace of functions. The fields of a function stand beside the type."""

    name: str = Field("", description="required")
    type: str = Field(
        max_length=64,
        description="function or namespace; web_search is ignored, others are refused",
    )
    tools: Annotated[list["FlatToolWire"], Field(max_length=MAX_TOOLS)] | None = Field(
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
        for place, tool in _placed(tools, "tools"):
            if tool.type in _DISPENSABLE:
                self.ignored.append(place)
            elif tool.type == "namespace":
                self._take_namespace(tool, place)
            else:
                self._take(tool, place)

    def origin(self, name: str) -> Origin:
        """Find the function that the model calls by this name."""
        return self.origins.get(name, Origin(name, None))

    def _take_namespace(self, tool: FlatToolWire, place: str) -> None:
        for name in ("name", "tools"):
            if not getattr(tool, name):
                raise InvalidInput(f"{place}.{name}", "is required in a namespace")
        if tool.description:
            # Chat templates have no place for it.
            self.ignored.append(f"{place}.description")
        for inner, function in _placed(tool.tools or (), f"{place}.tools"):
            self._take(function, inner, tool.name)

    def _take(self, tool: FlatToolWire, place: str, namespace: str | None = None) -> None:
        if tool.type != "function":
            allowed = "function" if namespace else "function and namespace"
            what = f"tools of type {tool.type[:40]!r} are not supported, only {allowed}"
            raise InvalidInput(f"{place}.type", what, code="unsupported_parameter")
        if not tool.name:
            raise InvalidInput(f"{place}.name", "is required")
        name = name_for_model(tool.name, namespace)
        if namespace is not None:
            self.origins[name] = Origin(tool.name, namespace)
        function = tool.model_dump(exclude_unset=True, exclude={"type"}) | {"name": name}
        self.made.append({"type": "function", "function": function})
        self.places.append(place)


def name_for_model(name: str, namespace: str | None) -> str:
    """Name a function for the model, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _placed(tools: Sequence[FlatToolWire], field: str) -> Iterator[tuple[str, FlatToolWire]]:
    return ((f"{field}[{i}]", tool) for i, tool in enumerate(tools))


def described_tool(tool: FlatToolWire) -> dict[str, Any]:
    """Write a tool as answers repeat it."""
    told = tool.model_dump(exclude_unset=True)
    if tool.type == "namespace":
        return told | {"tools": [described_tool(inner) for inner in tool.tools or ()]}
    if tool.type != "function":
        return told
    return told | {"parameters": tool.parameters, "strict": bool(tool.strict)}
