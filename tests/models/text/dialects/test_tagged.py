"""Arguments between tags: grammar and reader read the schema in the same way, and tags may be missing."""

import json
from typing import Any

import pytest

from moesaic.models.text.dialects.dialect import Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from tests.models.text.dialects.examples import dialect, read

STRING, NULL = {"type": "string"}, {"type": "null"}
FORMS = ["qwen3_coder", "glm45", "minimax_m2"]
DEFS = {"text": STRING, "loop": {"$ref": "#/$defs/loop"}}


def call(form: str, *arguments: tuple[str, str]) -> str:
    """Write a call of a form with these texts between the tags."""
    if form == "qwen3_coder":
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments)
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    if form == "glm45":
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments
        )
        return f"<tool_call>f\n{inner}</tool_call>"
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments)
    return f'<minimax:tool_call>\n<invoke name="f">\n{inner}</invoke>\n</minimax:tool_call>'


def arguments_in(form: str, text: str, properties: dict[str, Any]) -> Any:
    """Return the arguments of a text's only call, which are the same in every cut."""
    wanted = Wanted(
        (ToolFunction("f", {"type": "object", "properties": properties, "$defs": DEFS}),)
    )
    whole = read(dialect(form), text, wanted, "closed")
    for at in range(0, len(text), 1 + len(text) // 500):
        assert read(dialect(form), [text[:at], text[at:]], wanted, "closed") == whole
    assert read(dialect(form), list(text), wanted, "closed") == whole
    assert [part.kind for part in whole] == ["call", "arguments"]
    return json.loads(whole[1].text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["string", "null"]}, '"abc"', "abc"),
        ({"type": ["string", "null"]}, "abc", "abc"),
        ({"type": ["string", "null"]}, '"abc', '"abc'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "nullable", "nullable"),
        ({"type": "string"}, '"abc"', '"abc"'),
        ({"type": "string"}, "null", "null"),
        ({"anyOf": [STRING, NULL]}, "12345", "12345"),
        ({"oneOf": [STRING, NULL]}, "12345", "12345"),
        ({"allOf": [STRING]}, "12345", "12345"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "5", "5"),
        ({"$ref": "#/$defs/text"}, "12345", "12345"),
        ({"anyOf": [{"$ref": "#/$defs/text"}, NULL]}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "12345"}, "12345", "12345"),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": [1, "a"]}, "1", 1),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [STRING, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [STRING, {"type": "array"}]}, "[a]", "[a]"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "https://example.org/s.json"}, "5", 5),
        (True, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "integer"}, "None", None),
        ({"type": "object"}, "{'a': 1}", {"a": 1}),
        ({"type": "object"}, "{'a': True, 'b': None, \"c\": ('x', 'it\\'s',), 'd': []}",
         {"a": True, "b": None, "c": ["x", "it's"], "d": []}),
        ({"type": "object"}, '{"a": True}', {"a": True}),
        ({"type": "array"}, "['True', \"None\", '\\xe9\\u4e16\\n']", ["True", "None", "é世\n"]),
        ({"type": "array"}, "['\\ud800', 1]", ["\\ud800", 1]),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "__import__('os')", "__import__('os')"),
        ({"type": "object"}, '{"a": "</parameter></arg_value>"}', {"a": "</parameter></arg_value>"}),
        ({"type": "integer"}, "1.0", 1),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "+1", 1),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_a_value_is_read_by_its_schema(form: str, schema: Any, written: str, value: Any) -> None:
    found = arguments_in(form, call(form, ("a", written)), {"a": schema})["a"]

    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("form", FORMS)
def test_unnamed_arguments_are_read_by_additional_properties(form: str) -> None:
    known = ToolFunction("f", {"type": "object", "additionalProperties": STRING})
    open_one = ToolFunction("f", {"type": "object", "additionalProperties": True})
    text = call(form, ("a", "5"))

    assert json.loads(read(dialect(form), text, Wanted((known,)), "closed")[1].text) == {"a": "5"}
    assert json.loads(read(dialect(form), text, Wanted((open_one,)), "closed")[1].text) == {"a": 5}
    assert json.loads(
        read(dialect(form), text, Wanted((ToolFunction("g"),)), "closed")[1].text
    ) == {"a": 5}


QWEN, GLM, MINIMAX = FORMS
TWO = {"a": {"type": ["string", "null"]}, "b": STRING}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN, "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"),
        (QWEN, "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</function>\n</tool_call>"),
        (QWEN, "<function=f>\n<parameter=a>\n1\n  <parameter=b>\n2\n</function>"),
        (QWEN, "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</tool_call>"),
        (QWEN, "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</tool_call>"),
        (GLM,
         "<tool_call>f\n<arg_key>a</arg_key><arg_value>1\n<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"),
        (GLM, "<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>2</tool_call>"),
        (MINIMAX, '<invoke name="f">\n<parameter name="a">1\n<parameter name="b">2</parameter>\n</invoke>'),
        (MINIMAX,
         '<invoke name="f"><parameter name="a">1</parameter>\n<parameter name="b">2</invoke>\n</minimax:tool_call>'),
        (MINIMAX,
         '<invoke name="f"><parameter name="a">1</parameter><parameter name="b">2</parameter></minimax:tool_call>'),
    ],
)  # fmt: skip
def test_a_closing_tag_may_be_missing(form: str, text: str) -> None:
    assert arguments_in(form, text, TWO) == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "text",
    [
        "see <parameter=b> there",  # not on a line of its own
        "x\n<parameter=c>\ny",  # no argument of the function
        "x\n<parameter=a>\ny",  # given already
        "a </function> b",  # not at the end of the call
        "x\n<parameter=b\ny",  # no tag
        "</function",
    ],
)
def test_a_tag_that_closes_nothing_is_text(text: str) -> None:
    found = arguments_in(QWEN, call(QWEN, ("a", text), ("b", "2")), TWO)

    assert found == {"a": text, "b": "2"}


def test_a_number_ends_at_the_next_tag_wherever_it_stands() -> None:
    text = "<function=f><parameter=a>1<parameter=b>2</parameter></function>"

    assert arguments_in(QWEN, text, {"a": {"type": "integer"}, "b": STRING}) == {"a": 1, "b": "2"}


@pytest.mark.parametrize("piece", ["\\'", '\\"', "' ", ", ", " ", "(", "\\", "True"])
def test_a_long_invalid_value_stays_a_text(piece: str) -> None:
    written = f"[{piece * 15_000}x"
    wanted = Wanted(
        (ToolFunction("f", {"type": "object", "properties": {"a": {"type": "array"}}}),)
    )

    parts = read(dialect(QWEN), call(QWEN, ("a", written)), wanted, "closed")

    assert json.loads(parts[1].text) == {"a": written}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("given", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("number", "5", 5),
        ("flag", "True", True),
        ("other", "5", 5),  # fits none of them
        ("other", "x", "x"),
    ],
)
def test_earlier_arguments_decide_the_shape_of_a_call(
    form: str, given: str, written: str, value: Any
) -> None:
    kinds = {"text": STRING, "number": {"type": "number"}, "flag": {"type": "boolean"}}
    shapes = [{"properties": {"kind": {"const": k}, "value": v}} for k, v in kinds.items()]
    wanted = Wanted((ToolFunction("f", {"type": "object", "oneOf": shapes}),))
    text = call(form, ("kind", given), ("value", written))

    parts = read(dialect(form), list(text), wanted, "closed")

    assert parts == read(dialect(form), text, wanted, "closed")
    assert json.loads(parts[1].text) == {"kind": given, "value": value}


def test_a_function_without_described_arguments_takes_any_argument() -> None:
    text = "<function=f>\n<parameter=a>\n1\n<parameter=b>\nx\n<parameter=not one>\n</parameter>\n</function>"

    assert arguments_in(QWEN, text, {}) == {"a": 1, "b": "x\n<parameter=not one>"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schema", [STRING, {"anyOf": [STRING, NULL]}])
def test_a_text_is_streamed_as_it_comes(form: str, schema: Any) -> None:
    wanted = Wanted((ToolFunction("f", {"type": "object", "properties": {"a": schema}}),))
    text = call(form, ("a", "once upon a time"))
    reader = dialect(form).reader(wanted, "closed")
    assert reader is not None

    parts = reader.feed(text[: text.index("time")])

    assert "".join(part.text for part in parts).endswith('"a": "once upon a')
