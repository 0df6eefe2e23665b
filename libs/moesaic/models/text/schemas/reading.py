"""Reading a JSON schema once, for the grammar of a value and for the reader of the written value."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

ALL_KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
STRUCTURES = frozenset(("array", "object"))
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
TEXT_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
MAX_STEPS = 20_000  # for one schema: references may lead to one part again and again
SIZE_PER_STEP = 10  # listed values and conditions, which are combined one by one
MAX_DEPTH = 60
MAX_TEXTS = 16  # alternative conditions of a string

_INDEX = re.compile("[0-9]{1,9}")

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
        return united((self, other))

    def both(self, other: "Values") -> "Values":
        """Intersect the values of two schemas that both hold."""
        if ANYTHING in (self, other):
            return other if self == ANYTHING else self
        listed = {
            name: value
            for some, others in ((self, other), (other, self))
            for name, value in some.listed.items()
            if name in others.listed or kind_of(value) in others.kinds
        }
        ways: dict[frozenset[int], Conditions] = {}
        for a in self.texts:
            for b in other.texts:
                # Each once
                held = {id(one): one for one in (*a, *b)}
                ways.setdefault(frozenset(held), tuple(held.values()))
        return Values(self.kinds & other.kinds, listed, tuple(ways.values())[:MAX_TEXTS])

    @property
    def is_empty(self) -> bool:
        """True if no value is allowed."""
        return not self.kinds and not self.listed

    @property
    def size(self) -> int:
        """Number of what it lists."""
        return len(self.listed) + sum(map(len, self.texts))

    def disjoint(self, other: "Values") -> bool:
        """True if no value is allowed by both."""
        return self.both(other).is_empty


ANYTHING = Values(ALL_KINDS, {}, ((),))
NOTHING = Values(frozenset())


def united(each: Iterable[Values]) -> Values:
    """Unite schemas, one of which holds."""
    kinds, listed, texts = set[str](), dict[str, Any](), list[Conditions]()
    for values in each:
        kinds |= values.kinds
        listed |= values.listed
        texts += values.texts[: MAX_TEXTS if () in values.texts else MAX_TEXTS - len(texts)]
    return Values(frozenset(kinds), listed, ((),) if () in texts else tuple(texts[:MAX_TEXTS]))


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
        root = self._root if not base else self._named.get(_joined(self._identity, base))
        pointer = unquote(pointer)
        if pointer and not pointer.startswith("/"):
            return self._named.get(f"#{pointer}") if root is not None else None
        found = root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
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
                found.setdefault(_joined(self._identity, part["$id"]), part)
                found.setdefault(part["$id"], part)
        return found

    def values(self, schema: Any) -> Values:
        """Read the values that a schema allows; ``ANYTHING`` if that takes too many steps."""
        return self._values(schema, MAX_DEPTH)

    def _values(self, schema: Any, depth: int) -> Values:
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping) or not depth or self._steps < 0:
            return ANYTHING
        if id(schema) not in self._read:
            # What refers to itself says no more. The schema stays, so that no other one gets its id.
            self._read[id(schema)] = schema, ANYTHING
            self._read[id(schema)] = schema, self._combined(schema, depth - 1)
        return self._read[id(schema)][1]

    def _combined(self, schema: Mapping[str, Any], depth: int) -> Values:
        found = _own_values(schema)
        for values in self._also(schema, depth):
            ways = (len(found.texts) or 1), (len(values.texts) or 1)
            self._charge(ways[1] * found.size + ways[0] * values.size)
            if self._steps < 0:
                return ANYTHING
            found = found.both(values)
        if schema.get("nullable") is True and "null" not in found.kinds:
            found = found.either(Values(frozenset(("null",))))
        return found

    def _also(self, schema: Mapping[str, Any], depth: int) -> Iterator[Values]:
        """Read the schemas that hold beside the keywords of one."""
        for name in REFERENCES:
            if name in schema:
                yield self._values(self.resolved(schema[name]), depth)
        for part in listed(schema, "allOf"):
            yield self._values(part, depth)
        for name in ("anyOf", "oneOf"):
            if parts := listed(schema, name):
                yield united(self._charged(part, depth) for part in parts)

    def _charged(self, schema: Any, depth: int) -> Values:
        values = self._values(schema, depth)
        self._charge(values.size)
        return values

    def _charge(self, size: int) -> None:
        self._steps -= 1 + size // SIZE_PER_STEP

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
        needed = set(required_in(a)) & set(required_in(b))
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


def required_in(schema: Any) -> list[str]:
    """Read the names of properties that must be there; what is no name is left out."""
    return [one for one in listed(schema, "required") if isinstance(one, str)]


def number_in(schema: Any, name: str) -> float | None:
    """Read a keyword that is a number; None if it is none."""
    found = schema.get(name) if isinstance(schema, Mapping) else None
    return found if isinstance(found, (int, float)) else None


def mapping(schema: Any, name: str) -> Mapping[str, Any]:
    """Read a keyword that should be an object; empty if it is not."""
    found = schema.get(name) if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _own_values(schema: Mapping[str, Any]) -> Values:
    """Read the keywords of a schema that contain no other schema."""
    named = schema.get("type")
    kinds = frozenset(
        one if isinstance(one, str) else ""
        for one in (named if isinstance(named, list) else [named])
    )
    # No type, or an invalid one.
    if not named or not kinds <= ALL_KINDS:
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


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:  # no address
        return address


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
