"""JSON schemas for grammars: without ignored keywords, and without those that no grammar can enforce."""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from moesaic.models.text.schemas.keywords import FORMATS, KEYWORDS, is_plain_pattern, narrowed
from moesaic.models.text.schemas.reading import (
    REFERENCES,
    SchemaReader,
    kind_of,
    listed,
    mapping,
    number_in,
    required_in,
)

MAX_PARTS = 20_000  # that a binder writes: more of them make no grammar that is short enough
MAX_ONE_OF_MANY = 32  # properties of which at least one is required
MAX_COUNT = 2**31
MAX_BOUND = 10**18  # beyond it the grammar's library writes no ranges of numbers
_MOST = ("maxLength", "maxItems", "maxProperties")
_OUTER = ((("maximum", "exclusiveMaximum"), 1), (("minimum", "exclusiveMinimum"), -1))
_SUBSCHEMAS = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties")
_COMBINE = ("allOf", "anyOf", "oneOf", *REFERENCES)
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
    "contains": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
_PARTNERS = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
_LITERAL = re.compile(r"\^((?:[\w -]|\\[-_./])*)(?![*+?{|])")

Bound = Any  # a schema: an object or a boolean


class TooLong(Exception):
    """A grammar has more parts or characters than it may."""


class Binder:
    """Writes the schemas of one reader for grammars.

    Attributes:
        unenforced: keywords that restrict values, but were left out.
    """

    def __init__(self, reader: SchemaReader) -> None:
        self._reader = reader
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._left = MAX_PARTS
        self.unenforced: set[str] = set()

    def document(self, schema: Any) -> Bound:
        """Write a complete schema, with all parts that it refers to.

        Raises:
            TooLong: with all that was written before, it has too many parts.
        """
        self._names, self._waiting = {}, []
        written = self._bound(schema)
        shared = {}
        while self._waiting:
            name, target = self._waiting.pop()
            shared[name] = self._bound(target)
        return {**written, "$defs": shared} if shared else written

    def _bound(self, schema: Any) -> Bound:
        self._left -= 1
        if self._left < 0:
            raise TooLong
        if not isinstance(schema, Mapping):
            return schema
        written: dict[str, Any] = {}
        also: list[Any] = []
        for name, value in self._said(schema).items():
            if name in REFERENCES:
                also += self._reference(name, value)
            elif name == "oneOf":
                also.append({"anyOf": self._one_of(value)})
            elif name in _SUBSCHEMAS:
                written[name] = self._bound(value)
            elif name in _LISTS and isinstance(value, list):
                written[name] = [self._bound(part) for part in value]
            elif name in _MAPPINGS and isinstance(value, Mapping):
                written[name] = {key: self._bound(part) for key, part in value.items()}
            else:
                written[name] = value
        return self._with_null(schema, _combined(written, also))

    def _said(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the keywords that restrict values and that a grammar can enforce."""
        said = {}
        for name, value in schema.items():
            known = KEYWORDS.get(name)
            if value is None and name != "const":
                continue
            # A property's boolean of draft 3.
            if name == "required" and isinstance(value, bool):
                continue
            if known is None or known.effect == "ignored" or name in ("nullable", "$anchor", "$id"):
                continue
            if name in ("$defs", "definitions", "$dynamicAnchor"):
                continue
            if known.effect == "enforced":
                said[name] = value
            elif not _says_nothing(name, value, schema):
                self.unenforced.add(name)
        self._strings(said)
        self._numbers(said)
        self._arrays(said)
        self._objects(schema, said)
        return said

    def _strings(self, said: dict[str, Any]) -> None:
        pattern, form = said.get("pattern"), said.get("format")
        if isinstance(pattern, str) and not is_plain_pattern(pattern):
            self.unenforced.add("pattern")
            del said["pattern"]
        elif isinstance(pattern, str):
            said["pattern"] = narrowed(pattern)
        if isinstance(form, str) and (form not in FORMATS or FORMATS[form].effect != "enforced"):
            del said["format"]
            if form in FORMATS:
                self.unenforced.add("format")

    def _numbers(self, said: dict[str, Any]) -> None:
        """Write the exclusive bounds of draft 4, which are booleans, as numbers; and whole numbers as integers."""
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            is_old = isinstance(said.get(exclusive), bool)
            if is_old and said.pop(exclusive) and bound in said:
                said[exclusive] = said.pop(bound)
        for name, value in said.items():
            if (
                isinstance(value, float)
                and value.is_integer()
                and name not in ("const", "multipleOf")
            ):
                said[name] = int(value)
        for name in _MOST:
            # No answer is so long.
            if (number_in(said, name) or 0) > MAX_COUNT:
                del said[name]
        for names, sign in _OUTER:
            for name in names:
                if (number_in(said, name) or 0) * sign > MAX_BOUND:
                    self.unenforced.add(name)
                    del said[name]

    def _arrays(self, said: dict[str, Any]) -> None:
        """Write a list of ``items`` (draft 7) as ``prefixItems``."""
        rest = said.pop("additionalItems", None)
        if isinstance(said.get("items"), list):
            said["prefixItems"] = said.pop("items")
            if rest is not None:
                said["items"] = rest

    def _objects(self, schema: Mapping[str, Any], said: dict[str, Any]) -> None:
        if schema.get("unevaluatedProperties") is False and not any(n in schema for n in _COMBINE):
            self.unenforced.discard("unevaluatedProperties")
            said.setdefault("additionalProperties", False)
        patterns = list(mapping(said, "patternProperties"))
        if patterns and not _are_apart(patterns):
            self.unenforced.add("patternProperties")
            said.pop("additionalProperties", None)
            del said["patternProperties"]
        self._sizes(said)

    def _sizes(self, said: dict[str, Any]) -> None:
        """Enforce the number of properties, if all described ones are required."""
        properties, required = mapping(said, "properties"), set(required_in(said))
        least, most = said.get("minProperties"), said.get("maxProperties")
        closed = said.get("additionalProperties") is False and "patternProperties" not in said
        if isinstance(least, int) and least <= len(required):
            del said["minProperties"]
        if isinstance(most, int) and closed and most >= len(properties):
            del said["maxProperties"]
        if properties.keys() <= required:
            return
        if said.get("minProperties") == 1 and len(properties) <= MAX_ONE_OF_MANY:
            del said["minProperties"]
            one = {"anyOf": [{"required": [name]} for name in properties]}
            said["allOf"] = [*listed(said, "allOf"), one]
        for name in ("minProperties", "maxProperties"):
            if said.pop(name, None) is not None:
                self.unenforced.add(name)

    def _reference(self, name: str, value: Any) -> list[Any]:
        target = self._reader.resolved(value)
        if target is None:
            self.unenforced.add(name)
            return []
        if not isinstance(target, Mapping):
            return [target]
        known = self._names.get(id(target))
        if known is None:
            known = self._names[id(target)] = f"d{len(self._names)}"
            self._waiting.append((known, target))
        return [{"$ref": f"#/$defs/{known}"}]

    def _one_of(self, parts: Any) -> Any:
        if not isinstance(parts, list):
            return parts
        if not self._reader.are_disjoint(parts):
            self.unenforced.add("oneOf")
        return [self._bound(part) for part in parts]

    def _with_null(self, schema: Mapping[str, Any], written: dict[str, Any]) -> dict[str, Any]:
        if schema.get("nullable") is not True:
            return written
        without = {name: value for name, value in schema.items() if name != "nullable"}
        if "null" in self._reader.values(without).kinds:
            return written
        return {"anyOf": [written, {"type": "null"}]}


def _says_nothing(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if name in _PARTNERS:
        return not any(partner in schema for partner in _PARTNERS[name])
    return any(
        kind_of(value) == kind_of(one) and value == one for one in _SAYS_NOTHING.get(name, ())
    )


def _are_apart(patterns: list[str]) -> bool:
    """True if grammars can enforce patterns of names, since no name fits two of them."""
    if not all(map(is_plain_pattern, patterns)):
        return False
    begins = sorted(
        found.group(1) if "|" not in one and (found := _LITERAL.match(one)) else ""
        for one in patterns
    )
    # In order, what begins with another stands behind it.
    return not any(b.startswith(a) for a, b in pairwise(begins))


def _combined(written: dict[str, Any], also: list[Any]) -> dict[str, Any]:
    """Add further schemas that must hold: in place, if there is one whose keywords are free."""
    if len(also) == 1 and isinstance(also[0], Mapping) and not also[0].keys() & written.keys():
        return {**written, **also[0]}
    return {**written, "allOf": [*listed(written, "allOf"), *also]} if also else written
