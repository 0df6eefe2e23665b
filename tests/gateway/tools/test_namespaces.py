"""Namespaces of functions in ``/v1/responses``, and tools that models can do without: as Codex sends them."""

from typing import Any

import pytest

from tests.gateway.routes.test_responses import events_of
from tests.gateway.tools.conftest import ASKED, NOW, TOOL

FLAT = [{"type": "function", **tool["function"]} for tool in (TOOL, NOW)]
GROUP = {"type": "namespace", "name": "mcp__sky", "description": "The sky", "tools": FLAT}
SEARCH = {"type": "web_search", "external_web_access": False}
BODY: dict[str, Any] = {"input": ASKED, "tools": [SEARCH, GROUP]}
SAID = (
    '<tool_call>\n{"name": "mcp__sky__get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
CALLED = {"name": "get_weather", "namespace": "mcp__sky", "arguments": '{"city": "Paris"}'}
FUNCTIONS = [
    {"type": "function", "function": {**tool["function"], "name": f"mcp__sky__{name}"}}
    for tool in (TOOL, NOW)
    for name in [tool["function"]["name"]]
]
PATH = "/v1/responses"


def called(item: dict[str, Any]) -> dict[str, Any]:
    return {name: item[name] for name in CALLED}


async def test_a_call_tells_its_namespace_beside_its_name(open_house, scripts) -> None:
    async with open_house(scripts.says(SAID)) as house:
        whole = await house.client.post(PATH, json=BODY)
        streamed = await house.client.post(PATH, json={**BODY, "stream": True})
        await house.client.post(PATH, json={"input": ASKED, "tools": FUNCTIONS})
        chat = {"messages": ASKED, "tools": FUNCTIONS}
        await house.client.post("/v1/chat/completions", json=chat)
        as_group, _, as_functions = house.workers[0].submits

    [item] = whole.json()["output"]
    events = events_of(streamed.text)
    assert called(item) == CALLED
    assert called(events[-1]["response"]["output"][0]) == CALLED
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(one["namespace"], one["name"]) for one in added] == [("mcp__sky", "get_weather")]
    assert as_group.token_ids == as_functions.token_ids
    assert whole.json()["tools"][1]["tools"][1]["parameters"] is None
    assert whole.headers["x-moesaic-ignored"] == "tools[0], tools[1].description"


@pytest.mark.parametrize("stored", [True, False])
async def test_a_result_goes_back_to_the_call(open_house, scripts, stored, tmp_path) -> None:
    result = {"type": "function_call_output", "call_id": "", "output": "rain"}
    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        first = (await house.client.post(PATH, json=BODY)).json()
        [call] = first["output"]
        result["call_id"] = call["call_id"]
        before = {"previous_response_id": first["id"]} if stored else {}
        items = [result] if stored else [*ASKED, call, result]
        answer = await house.client.post(PATH, json={**BODY, **before, "input": items})
        function = {"name": "mcp__sky__get_weather", "arguments": call["arguments"]}
        calls = [{"id": call["call_id"], "type": "function", "function": function}]
        turns = [
            *ASKED,
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "rain"},
        ]
        chat = {"messages": turns, "tools": FUNCTIONS}
        await house.client.post("/v1/chat/completions", json=chat)
        *_, as_items, as_turns = house.workers[0].submits
        listed = await house.client.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc")

    assert as_items.token_ids == as_turns.token_ids
    assert called(listed.json()["data"][1]) == CALLED


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (
            [SEARCH, {**GROUP, "tools": [FLAT[0], {"type": "custom", "name": "a"}]}],
            "[1].tools[1].type",
        ),
        ([SEARCH, {**GROUP, "tools": [GROUP]}], "[1].tools[0].type"),
        ([SEARCH, {**GROUP, "tools": []}], "[1].tools"),
        ([SEARCH, {**GROUP, "name": ""}], "[1].name"),
        ([SEARCH, {**GROUP, "tools": [{**FLAT[0], "name": "a b"}]}], "[1].tools[0].name"),
        (
            [SEARCH, {**GROUP, "tools": [{**FLAT[0], "strict": True, "parameters": {"not": {}}}]}],
            "[1].tools[0].parameters",
        ),
    ],
)
async def test_a_mistake_is_named_where_it_is(open_house, scripts, tools, param) -> None:
    async with open_house(scripts.says("yes")) as house:
        answer = await house.client.post(PATH, json={"input": "a", "tools": tools})
        ok = await house.client.post(PATH, json=BODY)

    assert (answer.status_code, ok.status_code) == (400, 200), answer.text
    assert answer.json()["error"]["param"] == f"tools{param}"


async def test_two_functions_that_a_model_cannot_tell_apart_are_refused(
    open_house, scripts, family
) -> None:
    tools = [GROUP, {**FLAT[0], "name": "mcp__sky__get_weather"}]
    async with open_house(scripts.says("yes")) as house:
        answer = await house.client.post(PATH, json={"input": "a", "tools": tools})

    assert answer.status_code == 400
    assert "tools[1].name" in answer.json()["error"]["message"]


async def test_tools_of_a_function_are_ignored_and_not_told_to_the_model(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"input": ASKED, "tools": [{**FLAT[0], "tools": [FLAT[1]]}]}
        answer = await house.client.post(PATH, json=body)
        await house.client.post(PATH, json={"input": ASKED, "tools": FLAT[:1]})
        odd, plain = house.workers[0].submits

    assert answer.headers["x-moesaic-ignored"] == "tools[0].tools"
    assert odd.token_ids == plain.token_ids


NAMED = {"type": "function", "name": "get_weather"}
OTHER = {**GROUP, "name": "crm", "tools": [{**FLAT[0], "name": "find"}]}
IN_GROUP = {**NAMED, "namespace": "mcp__sky"}


@pytest.mark.parametrize(
    "choice",
    [
        IN_GROUP,
        NAMED,
        {"type": "function", "name": "mcp__sky__get_weather"},
        {"type": "function", "function": {"name": "get_weather", "namespace": "mcp__sky"}},
        {"type": "allowed_tools", "mode": "required", "tools": [IN_GROUP]},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    ],
)
async def test_a_function_in_a_namespace_can_be_chosen(open_house, scripts, choice) -> None:
    async with open_house(scripts.says(SAID)) as house:
        body = {**BODY, "tools": [GROUP, OTHER], "tool_choice": choice}
        answer = await house.client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        grammar = house.workers[0].submits[0].generation.grammar.grammar

    assert called(answer.json()["output"][0]) == CALLED
    assert answer.json()["tool_choice"] == choice
    assert "mcp__sky__get_weather" in grammar
    assert "crm__find" not in grammar


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (NAMED, "add the field namespace"),
        ({**NAMED, "namespace": "nowhere"}, "unknown tool"),
        ({**NAMED, "namespace": 5}, "unknown tool"),
    ],
)
async def test_a_choice_of_none_or_of_several_functions_is_refused(
    open_house, scripts, choice, says
) -> None:
    tools = [GROUP, {**GROUP, "name": "sea"}]
    async with open_house(scripts.says("yes")) as house:
        body = {**BODY, "tools": tools, "tool_choice": choice}
        answer = await house.client.post(PATH, json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert says in answer.json()["error"]["message"]
