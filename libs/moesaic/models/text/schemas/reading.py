"""Reading a JSON schema once, for the grammar of a value and for the reader of the written value."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

ALL_KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
TEXT_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
MAX_STEPS = 20_000  # for one schema: references may lead to one part again and again
MAX_DEPTH = 60
MAX_TEXTS = 16  # alternative conditions of a string

Conditions = tuple[Mapping[str, Any], ...]  # keywords about strings, all of which must hold


class Values(NamedTuple):
    """The values that a schema allows, as far as their reader must know.

    Attributes:
        kinds: kinds of which every value is allowed, apart from ``texts``.
        listed: single values that are allowed, by ``identity_of``.
        texts: alternative conditions of strings that are not listed.
        first: kinds whose values are not read as strings, although strings are allowed.
    """

    kinds: frozenset[str]
    listed: Mapping[str, Any] = {}
    texts: tuple[Conditions, ...] = ()
    first: frozenset[str] = frozenset()

    def allows(self, value: Any) -> bool:
        """True if a value is listed, or of an allowed kind."""
        return kind_of(value) in self.kinds or self.lists(value)

    def lists(self, value: Any) -> bool:
        """True if a value is listed."""
        return bool(self.listed) and identity_of(value) in self.listed

    def either(self, other: "Values") -> "Values":
        """Unite the values of two alternatives."""
        texts = (*self.texts, *other.texts)
        texts = ((),) if () in texts else texts[:MAX_TEXTS]
        return Values(self.kinds | other.kinds, {**self.listed, **other.listed}, texts)

    def both(self, other: "Values") -> "Values":
        """Intersect the values of two schemas that both hold."""
        listed = {
            name: value
            for some, others in ((self, other), (other, self))
            for name, value in some.listed.items()
            if name in others.listed or kind_of(value) in others.kinds
        }
        texts = [(*a, *b) for a in self.texts for b in other.texts]
        return Values(self.kinds & other.kinds, listed, tuple(texts[:MAX_TEXTS]))

    @property
    def is_empty(self) -> bool:
        """True if no value is allowed."""
        return not self.kinds and not self.listed

    def disjoint(self, other: "Values") -> bool:
        """True if no value is allowed by both."""
        return self.both(other).is_empty


ANYTHING = Values(ALL_KINDS, {}, ((),))
NOTHING = Values(frozenset())


def kind_of(value: Any) -> str:
    """Name the kind of a value; a number without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
    return "array" if isinstance(value, list) else "object"


def identity_of(value: Any) -> str:
    """Write a value so that equal values have equal texts; booleans are not numbers."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


class SchemaReader:
    """Reads the parts of one schema.

    Args:
        root: the whole schema, to which references are relative.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = MAX_STEPS
        self._read: dict[int, tuple[Any, Values]] = {}

    def resolved(self, reference: Any) -> Any:
        """Find the part that a reference points to; None if it is not in the schema."""
        if not isinstance(reference, str):
            return None
        base, _, pointer = reference.partition("#")
        root = self._root if not base else self._named.get(urljoin(self._identity, base))
        pointer = unquote(pointer)
        if pointer and not pointer.startswith("/"):
            return self._named.get(f"#{pointer}") if root is not None else None
        found = root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found if isinstance(found, (Mapping, bool)) else None

    @property
    def _identity(self) -> str:
        identity = self._root.get("$id") if isinstance(self._root, Mapping) else None
        return identity if isinstance(identity, str) else ""

    @cached_property
    def _named(self) -> Mapping[str, Any]:
        """Parts by their anchors and their ``$id``."""
        found: dict[str, Any] = {}
        for part in _parts(self._root):
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(name), str):
                    found.setdefault(f"#{part[name]}", part)
            if isinstance(part.get("$id"), str):
                found.setdefault(urljoin(self._identity, part["$id"]), part)
                found.setdefault(part["$id"], part)
        return found

    def values(self, schema: Any) -> Values:
        """Read the values that a schema allows; ``ANYTHING`` if that takes too many steps."""
        if id(schema) not in self._read:
            # The schema is kept, so that no other object gets its id.
            self._read[id(schema)] = schema, self._values(schema, MAX_DEPTH)
        return self._read[id(schema)][1]

    def _values(self, schema: Any, depth: int) -> Values:
        self._steps -= 1
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping) or not depth or self._steps < 0:
            return ANYTHING
        found = _own_values(schema)
        for name in REFERENCES:
            if name in schema:
                found = found.both(self._values(self.resolved(schema[name]), depth - 1))
        for part in listed(schema, "allOf"):
            found = found.both(self._values(part, depth - 1))
        for name in ("anyOf", "oneOf"):
            if parts := listed(schema, name):
                united = NOTHING
                for part in parts:
                    united = united.either(self._values(part, depth - 1))
                found = found.both(united)
        if schema.get("nullable") is True and "null" not in found.kinds:
            found = found.either(Values(frozenset(("null",))))
        return found

    def are_disjoint(self, schemas: Sequence[Any]) -> bool:
        """True if certainly no value fits two of the schemas."""
        pairs = [(a, b) for i, a in enumerate(schemas) for b in schemas[:i]]
        return len(schemas) <= 20 and all(self._differ(a, b) for a, b in pairs)

    def _differ(self, one: Any, other: Any) -> bool:
        if self.values(one).disjoint(self.values(other)):
            return True
        if "object" not in self.values(one).kinds & self.values(other).kinds:
            return False
        if len(self.values(one).both(self.values(other)).kinds) > 1:
            return False
        a, b = self._object_of(one), self._object_of(other)
        needed = set(listed(a, "required")) & set(listed(b, "required"))
        own, others = mapping(a, "properties"), mapping(b, "properties")
        return any(
            self.values(own[name]).disjoint(self.values(others[name]))
            for name in needed & own.keys() & others.keys()
        )

    def _object_of(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            if "$ref" not in schema:
                return schema
            schema = self.resolved(schema["$ref"])
        return {}


def listed(schema: Any, name: str) -> list[Any]:
    """Read a keyword that should be a list; empty if it is not."""
    found = schema.get(name) if isinstance(schema, Mapping) else None
    return found if isinstance(found, list) else []


def mapping(schema: Any, name: str) -> Mapping[str, Any]:
    """Read a keyword that should be an object; empty if it is not."""
    found = schema.get(name) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _own_values(schema: Mapping[str, Any]) -> Values:
    """Read the keywords of a schema that contain no other schema."""
    named = schema.get("type")
    kinds = frozenset(named if isinstance(named, list) else [named]) if named else ALL_KINDS
    if not kinds <= ALL_KINDS:  # an invalid type
        kinds = ALL_KINDS
    if "number" in kinds:
        kinds |= {"integer"}
    conditions = {k: schema[k] for k in TEXT_KEYWORDS if schema.get(k) is not None}
    texts = ((conditions,) if conditions else (),) if "string" in kinds else ()
    found = Values(kinds, {}, texts)
    if "const" in schema:
        found = found.both(_only([schema["const"]]))
    if isinstance(schema.get("enum"), list):
        found = found.both(_only(schema["enum"]))
    return found


def _only(values: Sequence[Any]) -> Values:
    return Values(frozenset(), {identity_of(value): value for value in values})


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
