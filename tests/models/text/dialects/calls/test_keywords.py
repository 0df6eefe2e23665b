"""Every keyword of JSON Schema has the effect on grammars that the table states."""

import json
from contextlib import nullcontext
from typing import Any

import pytest

from moesaic.engine.sequences.grammar_trial import compiled
from moesaic.models.text.dialects.rules import schema_text
from moesaic.models.text.dialects.written import as_json
from moesaic.models.text.schemas.binding import Binder
from moesaic.models.text.schemas.keywords import FORMATS, KEYWORDS, is_plain_pattern
from moesaic.models.text.schemas.raw_texts import expressions_of, slashes_escaped, whole_pattern
from moesaic.models.text.schemas.reading import SchemaReader
from tests.models.text.dialects.vocabulary import Vocabularies

pytest.importorskip("llguidance")

STR, INT, OBJ, ARR = ({"type": kind} for kind in ("string", "integer", "object", "array"))
AB = {**OBJ, "properties": {"a": INT, "b": INT}}
# For each keyword: a schema, a value that fits it, and one that does not.
ENFORCED: dict[str, tuple[Any, Any, Any]] = {
    "type": (INT, 1, "1"),
    "enum": ({"enum": [1, "a"]}, "a", "b"),
    "const": ({"const": [1]}, [1], [2]),
    "anyOf": ({"anyOf": [INT, {"type": "null"}]}, None, "a"),
    "allOf": ({"allOf": [INT, {"minimum": 3}]}, 3, 2),
    "oneOf": ({"oneOf": [INT, STR]}, "a", None),
    "properties": (AB, {"a": 1}, {"a": "x"}),
    "required": ({**AB, "required": ["b"]}, {"b": 1}, {"a": 1}),
    "items": ({**ARR, "items": INT}, [1], ["a"]),
    "prefixItems": ({**ARR, "prefixItems": [INT, STR]}, [1, "a"], ["a", 1]),
    "additionalItems": ({**ARR, "items": [INT], "additionalItems": STR}, [1, "a"], [1, 1]),
    "minimum": ({**INT, "minimum": 3}, 3, 2),
    "maximum": ({**INT, "maximum": 3}, 3, 4),
    "exclusiveMinimum": ({**INT, "exclusiveMinimum": 3}, 4, 3),
    "exclusiveMaximum": ({**INT, "maximum": 3, "exclusiveMaximum": True}, 2, 3),
    "multipleOf": ({**INT, "multipleOf": 5}, 10, 11),
    "minItems": ({**ARR, "minItems": 1}, [1], []),
    "maxItems": ({**ARR, "maxItems": 1.0}, [1], [1, 2]),
    "minLength": ({**STR, "minLength": 2}, "ab", "a"),
    "maxLength": ({**STR, "maxLength": 2}, "ab", "abc"),
    "pattern": ({**STR, "pattern": "^[a-c]{2}|x$"}, "ab", "d"),
    "format": ({**STR, "format": "date"}, "2024-01-31", "soon"),
    "additionalProperties": ({**AB, "additionalProperties": False}, {"a": 1}, {"c": 1}),
    "patternProperties": (
        {**OBJ, "patternProperties": {"^a": INT, "^b": STR}, "additionalProperties": False},
        {"a": 1, "b": "x"},
        {"a": "x"},
    ),
    "minProperties": ({**AB, "minProperties": 1}, {"b": 1}, {}),
    "maxProperties": ({**OBJ, "additionalProperties": INT, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "nullable": ({**INT, "nullable": True}, None, "a"),
    "$ref": ({"$ref": "#/$defs/i", "$defs": {"i": INT}}, 1, "a"),
    "$dynamicRef": ({"$dynamicRef": "#i", "$defs": {"i": {**INT, "$dynamicAnchor": "i"}}}, 1, "a"),
    "$recursiveRef": ({**OBJ, "properties": {"a": {"$recursiveRef": "#"}}}, {"a": {}}, {"a": 1}),
    "$defs": ({"$ref": "#/$defs/a%20b", "$defs": {"a b": INT}}, 1, "a"),
    "definitions": ({"$ref": "#/definitions/i", "definitions": {"i": INT}}, 1, "a"),
    "$anchor": ({"$ref": "#i", "$defs": {"x": {**INT, "$anchor": "i"}}}, 1, "a"),
    "$dynamicAnchor": ({"$ref": "#i", "$defs": {"x": {**INT, "$dynamicAnchor": "i"}}}, 1, "a"),
    "$id": ({"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/i", "$defs": {"i": INT}}, 1, "a"),
}  # fmt: skip
UNENFORCED: dict[str, Any] = {
    "uniqueItems": {**ARR, "uniqueItems": True},
    "if": {**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "then": {**AB, "if": True, "then": {"required": ["b"]}},
    "else": {**AB, "if": False, "else": {"required": ["b"]}},
    "not": {**STR, "not": {"const": "a"}},
    "propertyNames": {**OBJ, "propertyNames": {"pattern": "^a"}},
    "contains": {**ARR, "contains": INT},
    "minContains": {**ARR, "contains": INT, "minContains": 2},
    "maxContains": {**ARR, "contains": INT, "maxContains": 2},
    "dependentRequired": {**AB, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**AB, "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {**AB, "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"allOf": [AB], "unevaluatedProperties": False},
    "unevaluatedItems": {**ARR, "prefixItems": [INT], "unevaluatedItems": False},
}
PARTLY: list[tuple[str, Any]] = [
    ("oneOf", {"oneOf": [STR, {**STR, "minLength": 2}]}),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}),
    ("$ref", {"$ref": "https://example.org/other.json"}),
    ("$ref", {"$ref": "#/$defs/missing"}),
    (
        "patternProperties",
        {**OBJ, "patternProperties": {"^a": INT, "^ab": STR}, "additionalProperties": False},
    ),
    ("minProperties", {**AB, "minProperties": 2}),
    ("maxProperties", {**AB, "maxProperties": 1}),
    ("pattern", {**STR, "pattern": "(?=.*[0-9])[a-z]"}),
    ("format", {**STR, "format": "json-pointer"}),
]
SAYS_NOTHING: list[Any] = [
    {**ARR, "uniqueItems": False},
    {**OBJ, "if": {"required": ["a"]}},
    {**OBJ, "propertyNames": {"type": "string"}, "dependentRequired": {}, "minProperties": 0},
    {**ARR, "minContains": 2, "unevaluatedItems": True},
    {**STR, "format": "path", "pattern": None, "enum": None, "title": None},
    {**INT, "format": "int32"},
    {**AB, "properties": {**AB["properties"], "format": STR, "not": INT}},
    {**AB, "unevaluatedProperties": False},
    {**AB, "additionalProperties": False, "maxProperties": 2},
]  # fmt: skip

OF_FORMATS: dict[str, list[str]] = {
    "date-time": ["2024-02-28T10:00:00Z", "2024-02-28T10:00:00.5+02:00"],
    "time": ["10:00:00Z"],
    "date": ["2024-02-28", "2024-12-31"],
    "duration": ["P3D", "PT36H", "P1Y2M3DT4H5M6S", "P2W", "PT1M30S"],
    "email": ["a.b@example.org"],
    "hostname": ["example.org"],
    "ipv4": ["10.0.0.255"],
    "ipv6": ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2::3", "::2:3:4:5:6:7:8"],
    "uri": ["https://example.org/a?b=c#d"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
NOT_OF_FORMATS = {
    "date": ["2024-02-30", "2024-13-01", "202৩-01-01"],
    "duration": ["P", "PT", "P1", "P1DT", "P1S"],
    "ipv6": ["1::2::3", "1:2:3", "12345::", "1:2:3:4:5:6:7:8:9", "1::2:3:4:5:6:7:8"],
}


class Checker:
    def __init__(self, vocabularies: Vocabularies) -> None:
        self._vocabulary = vocabularies.of("hermes")

    def fits(self, schema: Any, value: Any) -> bool:
        document = Binder(SchemaReader(schema)).document(schema)
        return self._vocabulary.takes(f"start: %json {schema_text(document)}", as_json(value))

    def matches(self, expression: str, text: str) -> bool:
        return self._vocabulary.takes(f"start: /{slashes_escaped(expression)}/", text)


@pytest.fixture
def checker(vocabularies: Vocabularies) -> Checker:
    return Checker(vocabularies)


def unenforced_in(schema: Any) -> set[str]:
    binder = Binder(SchemaReader(schema))
    binder.document(schema)
    return binder.unenforced


def test_each_keyword_has_an_example() -> None:
    by_effect = {
        e: {n for n, k in KEYWORDS.items() if k.effect == e} for e in ("enforced", "unenforced")
    }

    assert by_effect == {"enforced": set(ENFORCED), "unenforced": set(UNENFORCED)}


@pytest.mark.parametrize("name", ENFORCED)
def test_enforced_keywords_are_enforced(checker: Checker, name: str) -> None:
    schema, fits, breaks = ENFORCED[name]

    assert unenforced_in(schema) == set()
    assert checker.fits(schema, fits)
    assert not checker.fits(schema, breaks)


@pytest.mark.parametrize(
    "name", [n for n, k in KEYWORDS.items() if k.effect == "ignored"] + ["x-own", "unit"]
)
@pytest.mark.parametrize("value", [True, "text", {"type": "null"}, ["a"]])
def test_ignored_keywords_change_nothing(name: str, value: Any) -> None:
    schema = {**AB, name: value}

    assert unenforced_in(schema) == set()
    assert Binder(SchemaReader(schema)).document(schema) == AB


@pytest.mark.parametrize(("name", "schema"), [*UNENFORCED.items(), *PARTLY])
def test_unenforced_keywords_are_named_and_left_out(
    checker: Checker, name: str, schema: Any
) -> None:
    named = unenforced_in(schema)

    assert name in named
    assert named <= {name, "if", "then", "else", "contains"}
    assert [value for value in ("x", 1, {}, []) if checker.fits(schema, value)]


@pytest.mark.parametrize("schema", SAYS_NOTHING)
def test_keywords_that_restrict_nothing_are_not_named(checker: Checker, schema: Any) -> None:
    assert unenforced_in(schema) == set()
    assert [value for value in ("x", 1, {}, []) if checker.fits(schema, value)]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_as_the_table_says(checker: Checker, name: str) -> None:
    schema = {**STR, "format": name}

    assert unenforced_in(schema) == ({"format"} if FORMATS[name].effect == "unenforced" else set())
    assert checker.fits(schema, "no such thing") == (FORMATS[name].effect == "unenforced")


PATTERNS = [
    r"^a$",
    r"a",
    r"^a|b$",
    r"(?=a)b",
    r"(?!a)b",
    r"(?<=a)b",
    r"(?<!a)b",
    r"(a)\1",
    r"\bfoo\b",
    r"\Bx",
    r"\Aa\Z",
    r"(?P<n>a)",
    r"(?<n>a)",
    r"\k<n>",
    r"\p{L}+",
    r"\d\w\s\D\W\S",
    r"(?>a)",
    r"a*?",
    r"a{2,}",
    r"a{,3}",
    r"\u0041",
    r"\x41",
    r"\cA",
    r"\/",
    r"[",
    r"a{100}",
    r"^(?:a|b)$",
    r"a^b",
    r"a$b",
    r"^[^\W_]+$",
    r"[\w.-]+",
    r"\-",
    r"\@",
    r"[[]",
    r"\e",
    r"\0",
    r"^$",
    r"(?:)",
    r"a|",
    r"|",
    r"a||b",
    r"\h",
    r"\R",
    r"(?#c)a",
    r"[^]",
    r"[]",
    r"[\b]",
    r"{",
    r"a{",
    r"\N",
    r"^\S+@\S+\.\S+$",
    r"(^a)|(b$)",
    r"(?=.*[A-Z])(?=.*\d).{8,}",
    r"^(\+\d{1,2}\s)?\(?\d{3}\)?$",
    r"*a",
    r"(a|a",
    r"a)",
    r"x(a",
    r"a\|?b",
    r"^\^*$",
    r"(*a)",
    r"^^a$$",
    r"é+",
    r"[é-ü]",
    r"\.",
    r"[\]]",
    r"[\^a]",
    r"([a-z]+\.)+[a-z]{2,}",
    r"^#[0-9a-fA-F]{6}$",
    r"a~b",
    r"[a~b]",
    r'"q"',
    r"a/b",
]


@pytest.mark.parametrize("pattern", [*PATTERNS, "", "a b"])
def test_a_pattern_is_left_out_only_if_it_cannot_be_enforced(
    vocabularies: Vocabularies, pattern: str
) -> None:
    can_be_held = (
        pytest.raises(ValueError, match=r".") if not is_plain_pattern(pattern) else nullcontext()
    )

    with can_be_held:
        compiled(
            vocabularies.of("hermes").known, "json_schema", json.dumps({**STR, "pattern": pattern})
        )


@pytest.mark.parametrize(
    ("pattern", "takes", "refuses"),
    [
        (r"^\d{2}$", "12", "1৩"),
        (r"^\w+$", "a_1", "é"),
        (r"^[\w.-]+$", "a.-", "é"),
        (r"^[\w-z]+$", "a-", "é"),
        (r"^[\w\W]+$", "é\u3000", ""),
        (r"^[^\d]+$", "a", "1"),
        (r"^\\d$", "\\d", "1"),
    ],
)
def test_digits_and_words_are_of_ascii_as_the_specification_says(
    checker: Checker, pattern: str, takes: str, refuses: str
) -> None:
    raw = whole_pattern(pattern)

    assert checker.fits({**STR, "pattern": pattern}, takes)
    assert not checker.fits({**STR, "pattern": pattern}, refuses)
    assert raw is not None
    assert checker.matches(raw, takes)
    assert not checker.matches(raw, refuses)


@pytest.mark.parametrize("name", [n for n, k in FORMATS.items() if k.effect == "enforced"])
def test_formats_are_enforced_between_tags(checker: Checker, name: str) -> None:
    [expression], unenforced = expressions_of([{"format": name}])

    assert unenforced == set()
    assert [text for text in OF_FORMATS[name] if not checker.matches(expression, text)] == []
    assert not checker.matches(expression, "no such thing")
    assert not [t for t in NOT_OF_FORMATS.get(name, []) if checker.matches(expression, t)]
