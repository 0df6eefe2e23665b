"""Functions that a model may call, as a request describes them."""

import functools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moesaic.models.text.schemas.binding import Binder
from moesaic.models.text.schemas.reading import NOTHING, SchemaReader, Values, mapping, required_in
from moesaic.models.text.schemas.shapes import Shape, is_combined, shapes_of

_LIKE_TEXTS = {"integer", "number", "boolean"}
MANY = 100  # arguments
ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True)
class ToolFunction:
    """One function; ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False  # its arguments always fit the schema

    @cached_property
    def reader(self) -> SchemaReader:
        """The reader of the schema, which grammars and answers share."""
        return SchemaReader(self.parameters)

    def prepare(self) -> None:
        """Read the schema now if that may take long: answers are read where nothing may."""
        if len(mapping(self.parameters, "properties")) > MANY or is_combined(self.parameters):
            self.arguments  # noqa: B018  # it stays

    @cached_property
    def _shapes(self) -> tuple[list[Shape], set[str]]:
        found, unenforced = shapes_of(self.reader, self.parameters)
        return [shape for shape in found if self._can_be(shape)], unenforced

    def _can_be(self, shape: Shape) -> bool:
        """True if each required argument has at least one possible value."""
        properties = mapping(shape, "properties")
        needed = (properties[name] for name in required_in(shape) if name in properties)
        return not any(self.reader.values(schema).is_empty for schema in needed)

    @property
    def shapes(self) -> Sequence[Shape]:
        """The alternative shapes of its arguments."""
        return self._shapes[0]

    @property
    def unenforced_shapes(self) -> Set[str]:
        """Keywords that its shapes do not enforce."""
        return self._shapes[1]

    @cached_property
    def arguments(self) -> Mapping[str, Values]:
        """The values that each argument may have, by name."""
        names = dict.fromkeys(
            name for shape in self.shapes for name in mapping(shape, "properties")
        )
        return {name: self._united(name, self.shapes) for name in names}

    def argument(self, name: str, given: Mapping[str, Any]) -> Values | None:
        """Find the values that an argument may have, after the ``given`` ones; None: the schema does not say."""
        if name not in self.arguments:
            return self._others
        if len(self.shapes) == 1 or not given:
            return self.arguments[name]
        fitting = [shape for shape in self.shapes if self._fits(shape, given)]
        named = [shape for shape in fitting if name in mapping(shape, "properties")]
        return self._united(name, named) if named else self.arguments[name]

    def _fits(self, shape: Shape, given: Mapping[str, Any]) -> bool:
        properties = mapping(shape, "properties")
        known = [name for name in given if name in properties]
        return all(self.reader.values(properties[name]).allows(given[name]) for name in known)

    def _united(self, name: str, shapes: Sequence[Shape]) -> Values:
        """Unite an argument's values in some shapes. Numbers of one shape are not read as strings of another."""
        schemas = [mapping(shape, "properties").get(name, False) for shape in shapes]
        each = [self.reader.values(schema) for schema in schemas]
        united = functools.reduce(Values.either, each, NOTHING)
        kinds = [values.kinds for values in each if "string" not in values.kinds]
        first = frozenset().union(*kinds) if "string" in united.kinds else frozenset()
        return united._replace(first=first & _LIKE_TEXTS)

    def may_have(self, name: str) -> bool:
        """True if an argument may have that name. Without described arguments, any usual name is one."""
        return name in self.arguments or (not self.arguments and bool(ARGUMENT.fullmatch(name)))

    @cached_property
    def _others(self) -> Values | None:
        """The values of arguments that the schema describes without naming them."""
        schemas = [schema for shape in self.shapes for schema in others_of(shape)]
        described = [self.reader.values(one) for one in schemas if isinstance(one, Mapping) and one]
        return functools.reduce(Values.either, described) if described else None

    @cached_property
    def bound(self) -> tuple[Any, set[str]]:
        """The schema for the grammar of its arguments, and the keywords that this leaves out.

        It allows only arguments that the function's own schema names.
        """
        binder = Binder(self.reader)
        shapes = [{"type": "object", **_closed(shape)} for shape in self.shapes]
        schema = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        document = binder.document(schema if shapes else False)
        return document, binder.unenforced | self._shapes[1]


def find(functions: Sequence[ToolFunction], name: str) -> ToolFunction:
    """Find a function by name; an unknown function has no described arguments."""
    return next((known for known in functions if known.name == name), ToolFunction(name))


def others_of(shape: Shape) -> list[Any]:
    """List the schemas of properties that a shape does not name."""
    additional = shape.get("additionalProperties")
    return [*mapping(shape, "patternProperties").values(), *([additional] if additional else [])]


def _closed(shape: Shape) -> Shape:
    own = {name: value for name, value in shape.items() if name != "type"}
    if own.get("additionalProperties") is None:
        own["additionalProperties"] = False
    return own
