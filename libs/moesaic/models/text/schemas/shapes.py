"""Alternative shapes of a function's arguments, without ``anyOf``, ``oneOf``, ``allOf`` and ``$ref`` at the root."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from moesaic.models.text.schemas.reading import (
    REFERENCES,
    SchemaReader,
    listed,
    mapping,
    required_in,
)

MAX_SHAPES = 32
MAX_PARTS = 200  # of one schema
MAX_MERGED = 50_000  # properties, each as often as it is merged
_COMBINE = ("allOf", "anyOf", "oneOf", *REFERENCES)

Shape = dict[str, Any]  # the schema of an object, without the keywords of _COMBINE


class TooManyShapes(Exception):
    """A schema has more shapes than a grammar should list."""


def is_combined(schema: Mapping[str, Any]) -> bool:
    """True if a schema is made of others."""
    return not schema.keys().isdisjoint(_COMBINE)


def shapes_of(reader: SchemaReader, schema: Mapping[str, Any]) -> tuple[list[Shape], set[str]]:
    """List the shapes of an object: a value fits the schema if it fits one of them.

    Returns:
        The shapes, and the keywords that they do not enforce.
    """
    try:
        expansion = _Expansion(reader)
        return expansion.of(schema), expansion.unenforced
    except TooManyShapes:
        own = {name: value for name, value in schema.items() if name not in _COMBINE}
        return [{**own, "additionalProperties": True}], {
            name for name in _COMBINE if name in schema
        }


class _Expansion:
    def __init__(self, reader: SchemaReader) -> None:
        self._reader, self._parts = reader, 0
        self._merged = 0
        self.unenforced: set[str] = set()

    def of(self, schema: Any) -> list[Shape]:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooManyShapes
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        if not _may_be_object(schema):
            return []
        own = {name: value for name, value in schema.items() if name not in _COMBINE}
        # Strictly read, it would forbid the properties of the combined schemas. Authors mean to close the combination.
        closes = own.get("additionalProperties") is False and any(n in schema for n in _COMBINE)
        if closes:
            del own["additionalProperties"]
        found: list[Shape] = [_needs_known(own)]
        for name in REFERENCES:
            if name in schema:
                found = self._both(found, self._referred(name, schema[name]))
        for part in listed(schema, "allOf"):
            found = self._both(found, self.of(part))
        for name in ("anyOf", "oneOf"):
            if parts := listed(schema, name):
                each = [self.of(part) for part in parts]
                each = self._exclusive(parts, each) if name == "oneOf" else each
                found = self._both(found, [shape for shapes in each for shape in shapes])
        return [{**shape, "additionalProperties": False} for shape in found] if closes else found

    def _referred(self, name: str, reference: Any) -> list[Shape]:
        target = self._reader.resolved(reference)
        if target is None:
            self.unenforced.add(name)
        return self.of(target)

    def _both(self, some: list[Shape], others: list[Shape]) -> list[Shape]:
        if len(some) * len(others) > MAX_SHAPES:
            raise TooManyShapes
        sizes = [
            sum(len(mapping(shape, "properties")) for shape in each) for each in (some, others)
        ]
        self._merged += sizes[0] * len(others) + sizes[1] * len(some)
        if self._merged > MAX_MERGED:
            raise TooManyShapes
        return [_merged(one, other) for one in some for other in others]

    def _exclusive(self, parts: list[Any], each: list[list[Shape]]) -> list[list[Shape]]:
        """Make the shapes of schemas exclusive: each loses a property that the other one requires."""
        if self._reader.are_disjoint(parts):
            return each
        kept = [list(shapes) for shapes in each]
        for here, there in combinations(range(len(each)), 2):
            for one, other in ((here, there), (there, here)):
                if not self._set_apart(kept[one], each[other]):
                    self.unenforced.add("oneOf")
        return kept

    def _set_apart(self, shapes: list[Shape], others: list[Shape]) -> bool:
        """Forbid a property in each shape that all others require; false if there is none."""
        apart = True
        for number, shape in enumerate(shapes):
            own = set(required_in(shape))
            for other in others:
                needed = [name for name in required_in(other) if name not in own]
                if needed:
                    without = {**mapping(shapes[number], "properties"), needed[0]: False}
                    shapes[number] = {**shapes[number], "properties": without}
                apart &= bool(needed)
        return apart


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds is None or "object" in (kinds if isinstance(kinds, list) else [kinds])


def _needs_known(shape: Shape) -> Shape:
    """Add properties that are required, but not described."""
    properties = mapping(shape, "properties")
    other = shape.get("additionalProperties")
    value = other if isinstance(other, Mapping) else {}
    missing = {n: value for n in required_in(shape) if n not in properties}
    return {**shape, "properties": {**properties, **missing}} if missing else shape


def _merged(one: Shape, other: Shape) -> Shape:
    """Combine two shapes that both hold."""
    merged = {**one, **other}
    if "properties" in one or "properties" in other:
        merged["properties"] = _both_properties(one, other)
    if "patternProperties" in one and "patternProperties" in other:
        patterns = mapping(one, "patternProperties"), mapping(other, "patternProperties")
        shared = {
            n: _both_schemas(patterns[0][n], patterns[1][n])
            for n in patterns[0]
            if n in patterns[1]
        }
        merged["patternProperties"] = {**patterns[0], **patterns[1], **shared}
    if "required" in one and "required" in other:
        merged["required"] = list(dict.fromkeys(required_in(one) + required_in(other)))
    for name, most in (("minProperties", max), ("maxProperties", min)):
        if isinstance(one.get(name), int) and isinstance(other.get(name), int):
            merged[name] = most(one[name], other[name])
    if "additionalProperties" in one and "additionalProperties" in other:
        merged["additionalProperties"] = _both_schemas(
            one["additionalProperties"], other["additionalProperties"]
        )
    return merged


def _both_properties(one: Shape, other: Shape) -> dict[str, Any]:
    """Combine properties. If only one shape describes a property, the other's ``additionalProperties`` holds for it."""
    own, others = mapping(one, "properties"), mapping(other, "properties")
    return {
        name: _both_schemas(
            own[name] if name in own else _unnamed(one),
            others[name] if name in others else _unnamed(other),
        )
        for name in (*own, *(name for name in others if name not in own))
    }


def _unnamed(shape: Shape) -> Any:
    additional = shape.get("additionalProperties")
    return True if additional is None or "patternProperties" in shape else additional


def _both_schemas(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one == other or other in (True, {}):
        return one
    return other if one in (True, {}) else {"allOf": [one, other]}
