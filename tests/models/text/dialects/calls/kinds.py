"""Schemas of one argument, and values that fit each of them."""

from typing import Any

TEXTS = [
    "Paris",
    "",
    "12345",
    "true",
    "None",
    "{'a': 1}",
    ' two  blanks \n and lines\n\n"quoted" \\ end ',
    "naïve 世界 🙂 \u2028",
    "<b>a &amp; b</b> </tool_call <parameter>",
    "see <parameter=other> and <arg_key>x and </function> there",
    "1\n<parameter=unknown>\n2",
    '{"a": 1}',
    "[TOOL_CALLS] no",
]
# Strings that are unambiguous in a union with other types.
PLAIN = [text for text in TEXTS if text not in ("None", '{"a": 1}')]
NUMBERS = [0, 7, -3, 12345678901234567890]
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
POINT = {
    "type": "object",
    "properties": {"x": INTEGER, "label": STRING},
    "required": ["x"],
    "additionalProperties": False,
}
POINTS: list[Any] = [
    {"x": 1},
    {"x": -2, "label": 'a "b" </parameter> </arg_value>\n</tool_call> c'},
]
TREE = {
    "type": "object",
    "properties": {"value": INTEGER, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["value"],
    "additionalProperties": False,
}
TREES: list[Any] = [{"value": 1}, {"value": 1, "below": [{"value": 2, "below": []}, {"value": 3}]}]
DEFS = {
    "text": STRING,
    "maybe": {"anyOf": [STRING, NULL]},
    "point": POINT,
    "tree": TREE,
    "a/b": INTEGER,
}
UNIT = {"enum": ["celsius", "kelvin"]}

KINDS: dict[str, tuple[Any, list[Any]]] = {
    "string": (STRING, TEXTS),
    "string or null": ({"type": ["string", "null"]}, [*PLAIN, None]),
    "optional string": ({"anyOf": [STRING, NULL]}, [*PLAIN, None]),
    "oneOf string": ({"oneOf": [STRING, NULL]}, [*PLAIN, None]),
    "allOf string": ({"allOf": [STRING, {"description": "d"}]}, TEXTS),
    "ref string": ({"$ref": "#/$defs/text"}, TEXTS),
    "ref of an optional string": ({"$ref": "#/$defs/maybe"}, [*PLAIN, None]),
    "ref in allOf": ({"allOf": [{"$ref": "#/$defs/text"}], "default": "x"}, TEXTS),
    "nullable string": ({"type": "string", "nullable": True}, [*PLAIN, None]),
    "string of a length": (
        {"type": "string", "minLength": 2, "maxLength": 4},
        ["ab", "12", "\n\n\n", "世界"],
    ),
    "string of a pattern": ({"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"}, ["ab-12", "z-00"]),
    "string with a part": ({"type": "string", "pattern": "[0-9]"}, ["a1b", "5"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"]),
    "path": ({"type": "string", "format": "path"}, ["/tmp/x", "", "5"]),
    "enum": (UNIT, ["celsius", "kelvin"]),
    "enum of texts like others": (
        {"enum": ["1", "true", "null", "", "a b", "two\nlines"]},
        ["1", "true", "null", "", "a b", "two\nlines"],
    ),
    "enum of all kinds": (
        {"enum": ["a", 1, 2.5, None, True, [1], {"a": 1}]},
        ["a", 1, 2.5, None, True, [1], {"a": 1}],
    ),
    "enum with null": ({"type": ["string", "null"], "enum": ["a", "b", None]}, ["a", "b", None]),
    "const text": ({"const": "12"}, ["12"]),
    "const number": ({"const": 12}, [12]),
    "integer": (INTEGER, NUMBERS),
    "integer in bounds": ({"type": "integer", "minimum": 1, "exclusiveMaximum": 10}, [1, 9]),
    "integer or null": ({"type": ["integer", "null"]}, [5, None]),
    "number": ({"type": "number"}, [0.5, -2.0, 3, 1e-7]),
    "boolean": ({"type": "boolean"}, [True, False]),
    "optional boolean": (
        {"anyOf": [{"type": "boolean"}, NULL], "default": None},
        [True, False, None],
    ),
    "null": (NULL, [None]),
    "auto or a number": ({"anyOf": [{"const": "auto"}, INTEGER]}, ["auto", 5]),
    "object": (POINT, POINTS),
    "ref object": ({"$ref": "#/$defs/point"}, POINTS),
    "free object": ({"type": "object"}, [{}, {"a": [1, "x", None, True, {"b": 0.5}]}]),
    "map": (
        {"type": "object", "additionalProperties": STRING},
        [{}, {"a": "1", "b": "</parameter>"}],
    ),
    "tree": ({"$ref": "#/$defs/tree"}, TREES),
    "array": ({"type": "array", "items": STRING}, [[], ["a", "</parameter>", "世"], ["[", "]"]]),
    "array of a length": (
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
        [["a", 1]],
    ),
    "text or list": (
        {"anyOf": [STRING, {"type": "array", "items": STRING}]},
        ["a b", "5", ["a", "b"], []],
    ),
    "text or object": ({"anyOf": [STRING, POINT, NULL]}, ["a", {"x": 1}, None]),
    "discriminated": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": k}, k: INTEGER},
                    "required": ["kind"],
                    "additionalProperties": False,
                }
                for k in ("one", "two")
            ],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "one", "one": 1}, {"kind": "two"}],
    ),
    "escaped ref": ({"$ref": "#/$defs/a~1b"}, [1]),
    "ref to a sibling": ({"$ref": "#/properties/other"}, ["x", "7"]),
    "annotated": (
        {
            **STRING,
            "title": "T",
            "examples": ["x"],
            "deprecated": True,
            "x-order": 1,
            "contentEncoding": "base64",
        },
        ["YQ=="],
    ),
    "anything": ({}, ["text", 5, [1], {"a": None}, True, None]),
}


def parameters_of(schema: Any, *, required: bool = True) -> dict[str, Any]:
    """Return the schema of a function with that argument and another one."""
    return {
        "type": "object",
        "properties": {"value": schema, "other": STRING},
        "required": ["value"] if required else [],
        "$defs": DEFS,
    }
