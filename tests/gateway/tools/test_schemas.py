"""Schemas of functions and answers: accepted, ignored and refused keywords; arguments that broke off."""

import json
from typing import Any

import pytest

from tests.gateway.tools.conftest import ASKED

PATH = "/v1/chat/completions"


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def one(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


MUST: dict[str, Any] = {"messages": ASKED, "tool_choice": "required"}
LOOKING_AHEAD = {"type": "string", "pattern": "(?=.*[0-9]).{3,}"}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@pytest.mark.parametrize("family", ["qwen3_coder"])
@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["string", "null"]}, '"abc"', "abc"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"type": "boolean"}, "True", True),
    ],
)
async def test_arguments_between_tags_are_read_by_their_schema(
    open_house, scripts, choice: str, schema: Any, written: str, value: Any
) -> None:
    said = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    body = {"messages": ASKED, "tools": [tool(one(schema))], "tool_choice": choice}
    async with open_house(scripts.says(said)) as house:
        response = await house.client.post(PATH, json=body)

    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": value}


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "format": "path"}, None),
        ({"type": "array", "uniqueItems": False}, None),
        (LOOKING_AHEAD, "pattern"),
        (UNIQUE, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
    ],
)
async def test_unenforced_keywords_are_named_and_refused_only_with_strict(
    open_house, scripts, schema: Any, named: str | None
) -> None:
    fine = tool({"type": "object"}, name="g")
    async with open_house(scripts.says("yes")) as house:
        free = await house.client.post(PATH, json={**MUST, "tools": [fine, tool(one(schema))]})
        strict = {**MUST, "tools": [fine, tool(one(schema), strict=True)]}
        refused = await house.client.post(PATH, json=strict)
        unbound = {"messages": ASKED, "tools": [tool(one(schema))]}
        unused = await house.client.post(PATH, json=unbound)

    field = "tools[1].function.parameters"
    assert free.status_code == 200, free.text
    assert free.headers.get("x-moesaic-ignored") == (f"{field}: {named}" if named else None)
    assert refused.status_code == (400 if named else 200)
    if named:
        assert refused.json()["error"]["param"] == field
        assert f"leave {named} out, or send strict false" in refused.json()["error"]["message"]
    assert unused.status_code == 200
    assert "x-moesaic-ignored" not in unused.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_the_enforceable_part_of_an_answers_schema_is_enforced(
    open_house, scripts, stream: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": UNIQUE, "b": {"type": "string", "format": "path"}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    async with open_house(scripts.says("yes")) as house:
        body = {"messages": ASKED, "stream": stream, "reasoning_effort": "none"}
        taken = await house.client.post(PATH, json={**body, "response_format": form})
        guided = await house.client.post(PATH, json={**body, "guided_json": schema})
        refused = await house.client.post(PATH, json={**body, "response_format": strict})
        sent = json.loads(house.workers[0].submits[1].generation.grammar.json_schema)

    assert taken.headers["x-moesaic-ignored"] == "response_format: uniqueItems"
    assert guided.headers["x-moesaic-ignored"] == "guided_json: uniqueItems"
    assert sent["properties"] == {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "string"},
    }
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


TAKEN: list[dict[str, Any]] = [
    {"type": ["object", "null"], "properties": {"a": {"type": "string"}}},
    {"type": ["object"], "properties": None, "required": None},
    {"type": None},
    {"anyOf": [one({"type": "string"}), one({"type": "integer"})]},
    {"$ref": "#/$defs/f", "$defs": {"f": one({"type": "string"})}},
    {},
]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
async def test_schemas_of_objects_are_accepted_in_every_spelling(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        for parameters in TAKEN:
            for body in (MUST, {"messages": ASKED}):
                response = await house.client.post(PATH, json={**body, "tools": [tool(parameters)]})
                assert response.status_code == 200, response.text


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    "odd", [{"type": [{}]}, {"required": [[]]}, {"format": {}}, {"anyOf": [{"required": [5]}]}]
)
async def test_what_is_no_schema_within_a_tool_stops_no_answer(
    open_house, scripts, odd: Any
) -> None:
    said = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"oneOf": [odd, odd]}}}
    async with open_house(scripts.says(said)) as house:
        for more in ({}, {"tool_choice": "required"}):
            body = {"messages": ASKED, "tools": [tool(one(odd))], **more}
            response = await house.client.post(PATH, json=body)
            assert response.status_code == 200, response.text
        formed = await house.client.post(PATH, json={"messages": ASKED, "response_format": form})
        assert formed.status_code == 200, formed.text


def turns(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*ASKED, answer, {"role": "tool", "tool_call_id": "call_1", "content": "broken"}, *ASKED]


BROKEN = [
    ('{"city": 7316', "7316"),
    ('{"city": "Pari', "Pari"),
    ('{"city": ["Paris", {"a": "Rom', "Rom"),
    ("[7316, 2]", "7316"),
    ('{"city": nowhere}', "nowhere"),
    ("no JSON at all", "no JSON at all"),
    ('"{\\"city\\": \\"Paris\\"}"', "Paris"),
    ("{", ""),
    ("null", ""),
    ("", ""),
]


@pytest.mark.parametrize("family", ["hermes", "deepseek", "harmony", "qwen3_coder"])
async def test_a_chat_continues_after_arguments_that_broke_off(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        for arguments, _ in BROKEN:
            body = {"messages": turns(arguments), "tools": [tool({"type": "object"})]}
            response = await house.client.post(PATH, json=body)
            assert response.status_code == 200, response.text
        submits = house.workers[0].submits

    for submit, (_, kept) in zip(submits, BROKEN, strict=True):
        tokens = list(submit.token_ids)
        assert kept in scripts.language.tokenizer.decode(tokens, skip_special_tokens=False)


async def test_a_call_that_max_tokens_cut_can_be_sent_back(open_house, scripts) -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"city": "Par'
    body = {"messages": ASKED, "tools": [tool({"type": "object"})]}
    async with open_house(scripts.says(said, stop=False)) as house:
        [choice] = (await house.client.post(PATH, json=body)).json()["choices"]
        again = await house.client.post(
            PATH, json={**body, "messages": [*ASKED, choice["message"], *ASKED]}
        )

    assert choice["finish_reason"] == "length"
    assert again.status_code == 200, again.text
