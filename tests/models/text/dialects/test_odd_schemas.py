"""Schemas that are none, or that would take very long to read."""

from typing import Any

import pytest

from moesaic.models.text.dialects.dialect import Dialect, Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.rules import schema_text
from moesaic.models.text.dialects.tagged import Glm, QwenCoder
from moesaic.models.text.schemas.binding import MAX_PARTS, Binder, TooLong
from moesaic.models.text.schemas.keywords import KEYWORDS
from moesaic.models.text.schemas.raw_texts import whole_pattern
from moesaic.models.text.schemas.reading import SchemaReader

ODD = (5, -1, 1e308, "x", None, True, [[]], [{}], [5], [None], {}, {"a": 5}, "http://[x#y")
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object", "properties": {"a": {"type": "string"}}, "$ref": "#/$defs/b"},
)


def grammar_of(parameters: Any) -> str | None:
    function = ToolFunction("f", parameters, strict=True)
    wanted = Wanted([function], needed=True, bound=True)
    texts = [
        Dialect(None, form).grammar(lambda text: None, "closed", wanted, None)
        for form in (QwenCoder(), Glm())
    ]
    assert function.bound
    return texts[0]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_value_of_a_keyword_stops_the_reader(keyword: str) -> None:
    for odd in ODD:
        for beside in BESIDE:
            schema = {**beside, keyword: odd}
            for whole in (schema, {"oneOf": [schema, {"required": ["q"]}]}):
                Binder(SchemaReader(whole)).document(whole)
                grammar_of(whole)
                grammar_of({"type": "object", "properties": {"a": whole}})


@pytest.mark.parametrize(
    "reference", ["http://[x#y", "#/oneOf/" + "9" * 5000, "#/oneOf/\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_a_reference_that_is_none_leads_nowhere(reference: str) -> None:
    schema = {"$id": "http://a/b", "oneOf": [{"$ref": reference}, {"$id": "http://[z"}]}
    binder = Binder(SchemaReader(schema))
    binder.document(schema)
    assert "$ref" in binder.unenforced


def test_parts_that_are_referred_to_over_and_over_are_read_once() -> None:
    texts = {"anyOf": [{"minLength": 1}, {"pattern": "a"}]}
    parts = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(30)}
    schema = {"$defs": {**parts, "d30": texts}, "$ref": "#/$defs/d0"}
    values = SchemaReader(schema).values(schema)
    assert max(map(len, values.texts)) <= 2


def test_patterns_of_names_are_told_apart_however_many_there_are() -> None:
    many = {f"^a{i}_": {} for i in range(5_000)}
    schema = {"type": "object", "patternProperties": many}
    binder = Binder(SchemaReader(schema))
    assert binder.document(schema)["patternProperties"].keys() == many.keys()
    schema = {"type": "object", "patternProperties": {"^ab|^c": {}, "^c": {}}}
    binder = Binder(SchemaReader(schema))
    binder.document(schema)
    assert binder.unenforced == {"patternProperties"}


def test_a_grammar_ends_growing_where_it_is_too_long() -> None:
    shared = {"enum": [f"value {i}" for i in range(1000)]}
    parts = {f"p{i}": {"$ref": "#/$defs/shared"} for i in range(1000)}
    texts = {f"p{i}": {"type": "string", "minLength": i} for i in range(1000)}
    for schema in ({"$defs": {"shared": shared}, "properties": parts}, {"properties": texts}):
        with pytest.raises(TooLong):
            grammar_of(schema)
    schema = {"allOf": [{"type": "string"}] * MAX_PARTS}
    with pytest.raises(TooLong):
        Binder(SchemaReader(schema)).document(schema)


@pytest.mark.parametrize(
    ("schema", "unenforced"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum", "maximum"}),
        ({"type": "number", "maximum": 1.7976931348623157e308}, {"maximum"}),
        ({"type": "number", "exclusiveMinimum": -1e19, "maximum": 5}, {"exclusiveMinimum"}),
        ({"type": "string", "maxLength": 2**63 - 1}, set()),
        ({"type": "number", "minimum": -(10**18), "maximum": 10**18}, set()),
    ],
)
def test_bounds_that_no_grammar_can_count_to_are_left_out(
    schema: dict[str, Any], unenforced: set[str]
) -> None:
    binder = Binder(SchemaReader(schema))
    text = schema_text(binder.document(schema))
    matcher = pytest.importorskip("llguidance").LLMatcher
    grammar = matcher.grammar_from_json_schema(text)
    assert matcher.validate_grammar(grammar) == ""
    assert binder.unenforced == unenforced


def test_large_schemas_are_not_merged_over_and_over() -> None:
    ways = [
        {"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(5)
    ]
    many = {f"p{i}": {"type": "integer"} for i in range(5_000)}
    function = ToolFunction("f", {"properties": many, "allOf": ways})
    assert function.unenforced_shapes == {"allOf"}
    assert function.argument("p1", {}) == SchemaReader({}).values({"type": "integer"})


def test_schemas_that_take_long_are_read_before_the_answer() -> None:
    many = {f"p{i}": {"type": "integer"} for i in range(1000)}
    large, combined = ToolFunction("f", {"properties": many}), ToolFunction("f", {"anyOf": [{}]})
    small = ToolFunction("f", {"properties": {"a": {}}})
    for function in (large, combined, small):
        function.prepare()
    assert ["arguments" in vars(f) for f in (large, combined, small)] == [True, True, False]


def test_patterns_may_be_nested_as_deep_as_they_like() -> None:
    deep = "(" * 20_000 + "a|b" + ")" * 20_000
    assert whole_pattern(f"^{deep}$") == f"(?:{deep})"
    assert whole_pattern(f"^{deep}|c$") is None
