"""Rules of arguments between tags. Their reader reads every allowed text as arguments that fit the schema."""

import json
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any, ClassVar

from moesaic.models.text.dialects.call_form import LINE
from moesaic.models.text.dialects.functions import ARGUMENT, ToolFunction, others_of
from moesaic.models.text.dialects.rules import Rules
from moesaic.models.text.schemas.binding import MAX_ONE_OF_MANY, Binder
from moesaic.models.text.schemas.raw_texts import (
    ANY,
    NO_JSON,
    SCALAR,
    escaped,
    expressions_of,
    whole_pattern,
)
from moesaic.models.text.schemas.reading import (
    ALL_KINDS,
    STRUCTURES,
    Values,
    mapping,
    number_in,
    required_in,
)
from moesaic.models.text.schemas.shapes import Shape

_KEY_CHARACTERS = r'[^<>"\s]{1,100}'
_WORDS = {"boolean": ("True", "False"), "null": ("None", "null")}
_HELD_HERE = ("type", "properties", "required", "additionalProperties", "patternProperties")
_SIZES = ("minProperties", "maxProperties")


class ArgumentTags:
    """The tags of a form.

    Attributes:
        key_tags: tags around the name of an argument.
        value_tags: tags around its value; the first one is empty if the name's closing tag opens the value too.
        line: text between these tags and the value.
        end: the tag that closes the call.
        followers: tags that may follow a call, also if its closing tag is missing.
    """

    key_tags: ClassVar[tuple[str, str]]
    value_tags: ClassVar[tuple[str, str]]
    line: ClassVar[str] = ""
    end: ClassVar[str]
    followers: ClassVar[tuple[str, ...]]

    @property
    def ends(self) -> tuple[str, ...]:
        """Closing tags that end a call."""
        return (self.end, *(tag for tag in self.followers if tag.startswith("</")))


def arguments_rule(tags: ArgumentTags, rules: Rules, function: ToolFunction) -> str:
    """Write the rule of the arguments in the order of the schema, with an alternative for each shape."""
    rules.leave_out(function, function.unenforced_shapes)
    ways = [_ShapeRule(tags, rules, function, shape).whole() for shape in function.shapes]
    return f"({' | '.join(map(rules.add, ways))})" if ways else rules.value(False)


class _ShapeRule:
    def __init__(
        self, tags: ArgumentTags, rules: Rules, function: ToolFunction, shape: Shape
    ) -> None:
        self._tags, self._rules, self._function, self._shape = tags, rules, function, shape
        self._binder = Binder(function.reader)
        self._properties = mapping(shape, "properties")
        self._required = frozenset(required_in(shape))

    def whole(self) -> str:
        named = {
            key: rule
            for key, schema in self._properties.items()
            if (rule := self._argument(key, schema)) is not None
        }
        least = number_in(self._shape, "minProperties")
        if least == 1 and 0 < len(named) <= MAX_ONE_OF_MANY and not self._required:
            orders = [list(named)[i:] for i in range(len(named))]
            ways = [
                self._in_order({key: named[key] for key in order}, order[0]) for order in orders
            ]
            rule = f"({' | '.join(ways)})"
        else:
            rule = self._in_order(named)
        others = self._others()
        self._note_unenforced(len(named), held_least=least == 1 and rule.startswith("("))
        return " ".join([rule, *others]).strip() or '""'

    def _in_order(self, named: Mapping[str, str], first: str = "") -> str:
        return " ".join(
            rule if key == first or key in self._required else f"({rule})?"
            for key, rule in named.items()
        )

    def _note_unenforced(self, most: int, *, held_least: bool) -> None:
        shape = self._shape
        rest = {k: v for k, v in shape.items() if k not in (*_HELD_HERE, *_SIZES)}
        self._binder.document(rest)
        unenforced = set(self._binder.unenforced)
        least, at_most = (number_in(shape, name) for name in _SIZES)
        if least is not None and not held_least and least > len(self._required):
            unenforced.add("minProperties")
        if at_most is not None and (at_most < most or others_of(shape)):
            unenforced.add("maxProperties")
        self._rules.leave_out(self._function, unenforced)

    def _others(self) -> list[str]:
        """Write the rules of arguments that the schema describes without naming them."""
        shape, known = self._shape, "|".join(map(escaped, self._properties))
        patterns = mapping(shape, "patternProperties")
        keys = []
        for pattern, schema in patterns.items():
            whole = whole_pattern(pattern)
            if whole is None:
                self._binder.unenforced.add("patternProperties")
            else:
                keys.append((f"/{_KEY_CHARACTERS}/ & /{whole}/", schema))
        additional = shape.get("additionalProperties")
        if additional and not patterns:
            keys.append((f"/{ARGUMENT.pattern}/", additional))
        but = f" & ~/{known}/" if known else ""
        rules = [
            self._tagged(self._rules.terminal(f"{key}{but}"), self._value(schema, frozenset()))
            for key, schema in keys
            if schema is not False
        ]
        return [f"({' | '.join(rules)})*"] if rules else []

    def _argument(self, key: str, schema: Any) -> str | None:
        if self._function.reader.values(schema).is_empty:
            return None
        return self._tagged(
            self._rules.text(key), self._value(schema, self._function.arguments[key].first)
        )

    def _tagged(self, key: str, value: str) -> str:
        tags, text = self._tags, self._rules.text
        opening = tags.value_tags[0]
        between = f"{text(LINE)}? {text(opening)}" if opening else ""
        after = f"{text(LINE)}?" if opening else text(LINE)
        parts = [text(tags.key_tags[0]), key, text(tags.key_tags[1]), between, text(tags.line)]
        return " ".join(part for part in (*parts, value, after) if part)

    def _value(self, schema: Any, first: Set[str]) -> str:
        """Write the ways to spell a value, with its closing tag.

        Args:
            schema: schema of the value.
            first: kinds whose values a string must not look like.
        """
        values = self._function.reader.values(schema)
        document = self._binder.document(schema)
        tail = self._rules.text(self._tags.line + self._tags.value_tags[1])
        ways = [f"{self._rules.text(one)} {tail}" for one in self._spellings(values)]
        is_free = values.kinds == ALL_KINDS and document in ({}, True) and not first
        if "string" in values.kinds:
            ways += self._texts(values, may_be_any=is_free, no_scalars=bool(first))
        if not is_free and (_needs_json(values) or first):
            ways.append(f"{self._rules.value(document)} {tail}")
        return self._rules.add(" | ".join(ways))

    def _spellings(self, values: Values) -> list[str]:
        close = self._tags.value_tags[1]
        found = [word for kind in _WORDS if kind in values.kinds for word in _WORDS[kind]]
        for one in values.listed.values():
            if isinstance(one, str):
                found.append(one if close not in one else json.dumps(one).replace("<", "\\u003c"))
            else:
                found += [str(one)] if one is None or isinstance(one, bool) else []
        if "string" in values.kinds and "boolean" in values.kinds:
            found = [word for word in found if word not in _WORDS["boolean"]]
        return list(dict.fromkeys(found))

    def _texts(self, values: Values, *, may_be_any: bool, no_scalars: bool) -> list[str]:
        ways, never = [], self._never
        others = values.kinds - {"string"}
        line, closing = self._tags.line, self._tags.value_tags[1]
        if no_scalars or (values.kinds == ALL_KINDS and not may_be_any):
            end = "" if self._rules.is_token(closing) else escaped(line + closing)
            never = [*never, SCALAR + end]
        for conditions in values.texts:
            expressions, unenforced = expressions_of(conditions)
            self._binder.unenforced |= unenforced
            is_mixed = no_scalars or (others and (others & STRUCTURES or expressions))
            if is_mixed and not may_be_any:
                expressions = [*expressions, NO_JSON]
            ways.append(self._rules.text_until(closing, expressions, never, line))
        return ways

    @cached_property
    def _never(self) -> Sequence[str]:
        """Expressions of texts in which the reader sees the end of a value without its closing tag."""
        tags, rules, never = self._tags, self._rules, []
        others = list(map(escaped, self._function.arguments)) or [ARGUMENT.pattern]
        if not rules.is_token(tags.key_tags[0]):
            opening, closing = (escaped(tag) for tag in tags.key_tags)
            names = rf"{opening}\s*(?:{'|'.join(others)})\s*{closing}"
            never.append(rf"(?:{ANY}\n)?\s*{names}{ANY}")
        if not any(map(rules.is_token, tags.ends)):
            ends, after = ("|".join(map(escaped, some)) for some in (tags.ends, tags.followers))
            never.append(rf"{ANY}(?:{ends})\s*(?:{after}){ANY}")
        return never


def _needs_json(values: Values) -> bool:
    """True if the rule of strings does not cover all values of a schema."""
    if "string" in values.kinds and not values.kinds & STRUCTURES:
        return any(not isinstance(one, str) for one in values.listed.values())
    return bool(values.kinds) or any(not isinstance(one, str) for one in values.listed.values())
