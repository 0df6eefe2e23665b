"""Functions that a model may call, as a request describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolFunction:
    """One function; ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False  # its arguments always fit the schema

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the arguments, by name."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def is_text(self, argument: str) -> bool:
        """True if the argument can only be a text."""
        schema = self.properties.get(argument)
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def may_be_text(self, argument: str) -> bool:
        """True if the schema lists a text among what the argument may be."""
        schema = self.properties.get(argument)
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        return kinds is not None and "string" in kinds


def find(functions: Sequence[ToolFunction], name: str) -> ToolFunction:
    """Look a function up; of one that is not there nothing is known."""
    return next((known for known in functions if known.name == name), ToolFunction(name))
