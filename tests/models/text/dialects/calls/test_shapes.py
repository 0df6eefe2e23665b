"""Forced calls fit schemas with combinations at the root, in every form."""

import json
import random
from itertools import islice
from typing import Any

import jsonschema
import pytest

from moesaic.models.text.dialects.dialect import Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from tests.models.text.dialects.examples import ANSWERS, dialect, read
from tests.models.text.dialects.vocabulary import Vocabularies, Vocabulary

pytest.importorskip("llguidance")

UNIT, DAYS, NAME = {"enum": ["celsius", "kelvin"]}, {"enum": [1, 2]}, {"const": "x"}


def an_object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


A, B = an_object(["unit"], unit=UNIT), an_object(["days"], days=DAYS)
SCHEMAS: dict[str, Any] = {
    "anyOf": {"anyOf": [A, B]},
    "oneOf": {"type": "object", "oneOf": [A, B]},
    "allOf": {"allOf": [A, B]},
    "ref": {"$ref": "#/$defs/a", "$defs": {"a": A}},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": {"allOf": [A, B]}}},
    "closed": {"anyOf": [A, B], "additionalProperties": False, "type": "object"},
    "own and others": {**an_object(["days"], days=DAYS), "anyOf": [A, an_object([], name=NAME)]},
    "needs one of two": {
        **an_object([], unit=UNIT, days=DAYS),
        "anyOf": [{"required": ["unit"]}, {"required": ["days"]}],
    },
    "needs just one of two": {
        **an_object([], unit=UNIT, days=DAYS),
        "oneOf": [{"required": ["unit"]}, {"required": ["days"]}],
    },
    "nested": {"allOf": [{"anyOf": [A, {"oneOf": [B, {"$ref": "#/$defs/n"}]}]}],
               "$defs": {"n": an_object(["name"], name=NAME)}},
    "discriminated": {"oneOf": [
        an_object(["kind"], kind={"const": "a"}, unit=UNIT),
        an_object(["kind"], kind={"const": "b"}, days=DAYS),
    ]},
    "one name of several kinds": {"anyOf": [
        an_object(["p"], p={"type": "number"}),
        an_object(["r"], p={"type": ["string", "null"], "format": "date"}, r=DAYS),
        an_object(["r"], r={"const": "x"}, p={"type": "boolean"}),
    ]},
    "or null": {"anyOf": [A, {"type": "null"}]},
    "nullable": {**A, "type": ["object", "null"]},
    "one property in both": {"allOf": [an_object(["days"], days=DAYS), an_object([], days={"minimum": 2})]},
    "needs what it does not name": {"type": "object", "required": ["unit"], "additionalProperties": UNIT},
    "at least one": {**an_object([], unit=UNIT, days=DAYS), "minProperties": 1},
    "a map": {"type": "object", "additionalProperties": UNIT},
    "a map beside": {**A, "additionalProperties": DAYS},
    "patterns": {"type": "object", "patternProperties": {"^x_[a-z]{1,3}$": DAYS}, "additionalProperties": False},
    "a null in it": {**A, "additionalProperties": None, "description": None},
}  # fmt: skip


def check(form: str, schema: Any, vocabulary: Vocabulary, draws: int) -> None:
    wanted = Wanted((ToolFunction("f", schema, strict=True),), needed=True, bound=True, many=False)
    unenforced: dict[str, set[str]] = {}
    grammar = dialect(form).grammar(vocabulary.token_id, "closed", wanted, None, unenforced)
    assert grammar is not None
    assert not unenforced
    checker = jsonschema.Draft202012Validator(
        {**schema, "additionalProperties": schema.get("additionalProperties") or True}
    )
    rng = random.Random(f"{form} {schema}")
    answers = (answer for _ in range(12) if (answer := vocabulary.spoken(grammar, rng)) is not None)
    told = [read(dialect(form), answer, wanted, "closed") for answer in islice(answers, draws)]
    assert told
    for parts in told:
        [arguments] = [json.loads(part.text) for part in parts if part.kind == "arguments"]
        assert not list(checker.iter_errors(arguments)), arguments


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_a_forced_call_fits_its_schema(form: str, name: str, vocabularies: Vocabularies) -> None:
    check(form, SCHEMAS[name], vocabularies.of(form), draws=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("form", ANSWERS)
def test_a_forced_call_fits_its_schema_in_every_form(
    form: str, name: str, vocabularies: Vocabularies
) -> None:
    check(form, SCHEMAS[name], vocabularies.of(form), draws=8)


def test_a_schema_of_very_many_shapes_is_partly_enforced() -> None:
    one = {"anyOf": [an_object([f"p{i}"], **{f"p{i}": UNIT}) for i in range(10)]}
    many = ToolFunction("f", {**A, "allOf": [one, one, one]}, strict=True)
    bomb: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)
    }
    referring = ToolFunction("f", {"$ref": "#/$defs/d0", "$defs": {**bomb, "d30": A}})

    assert many.bound[1] == {"allOf"}
    assert [shape["properties"] for shape in many.shapes] == [{"unit": UNIT}]
    assert referring.bound[1] == {"$ref"}
    assert referring.reader.values({"$ref": "#/$defs/d0"}).kinds
