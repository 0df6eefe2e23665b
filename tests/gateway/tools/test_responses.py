"""Calls and reasoning as items of ``/v1/responses``, for each family."""

from typing import Any

import pytest

from moesaic.services.gateway.fields.messages import MAX_CALLS
from tests.gateway.routes.test_responses import events_of
from tests.gateway.tools.conftest import ASKED, NOW, TOOL
from tests.gateway.tools.test_answers import SAID, every_family

FLAT = [{"type": "function", **tool["function"]} for tool in (TOOL, NOW)]
BODY: dict[str, Any] = {
    "input": ASKED,
    "tools": FLAT,
    "chat_template_kwargs": {"thinking": True},
}
SWITCH = "chat_template_kwargs.thinking"  # which some of the templates do not have
PATH = "/v1/responses"


def plain(output: list[dict[str, Any]]) -> list[Any]:
    """Reduce items to what the model said."""
    return [
        (item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["type"], item["content"][0]["text"])
        for item in output
    ]


PARTS = [
    ("reasoning", "it asks"),
    ("message", "I look."),
    ("get_weather", '{"city": "Paris"}'),
    ("now", "{}"),
]


@every_family
async def test_a_whole_answer_has_its_items(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        answer = (await house.client.post(PATH, json=BODY)).json()

    assert plain(answer["output"]) == PARTS
    assert len({item["id"] for item in answer["output"]}) == 4
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert answer["tools"][1] == {
        "type": "function",
        "name": "now",
        "parameters": None,
        "strict": False,
    }


@every_family
async def test_a_stream_builds_the_same_items(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        body = {**BODY, "stream": True, "include": ["message.output_text.logprobs"]}
        events = events_of((await house.client.post(PATH, json=body)).text)

    built: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(built)
            built[event["output_index"]] = []
        elif event["type"].endswith(".delta"):
            built[event["output_index"]].append(event["delta"])
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert ["".join(pieces) for pieces in built.values()] == [text for _, text in PARTS]
    assert plain(done) == PARTS
    assert events[-1]["response"]["output"] == done
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    for name in ("reasoning_text", "output_text", "function_call_arguments"):
        assert f"response.{name}.done" in kinds
    [message] = [item for item in done if item["type"] == "message"]
    told = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert "I look." in told


@every_family
async def test_items_that_come_back_are_one_turn_of_the_model(
    open_house, scripts, family: str
) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    items = [
        *ASKED,
        {**reasoning, "content": [{"type": "reasoning_text", "text": "so"}]},
        {**call, "id": "fc_1", "status": "completed"},
        output,
    ]
    function = {"name": "now", "arguments": "{}"}
    turns = [
        *ASKED,
        {
            "role": "assistant",
            "reasoning": "so",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    async with open_house(scripts.says(SAID[family])) as house:
        answer = await house.client.post(PATH, json={**BODY, "input": items})
        chat = {"messages": turns, "tools": [TOOL, NOW], "chat_template_kwargs": {"thinking": True}}
        await house.client.post("/v1/chat/completions", json=chat)
        [as_items, as_turns] = house.workers[0].submits

    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-moesaic-ignored", SWITCH) == SWITCH
    assert as_items.token_ids == as_turns.token_ids


async def test_a_turn_has_as_many_calls_as_one_of_a_chat(open_house, scripts) -> None:
    call = {"type": "function_call", "name": "now", "arguments": "{}"}
    calls = [{**call, "call_id": f"c{i}"} for i in range(MAX_CALLS + 1)]
    async with open_house(scripts.says("yes")) as house:
        most = await house.client.post(PATH, json={"input": [*ASKED, *calls[1:]]})
        more = await house.client.post(PATH, json={"input": [*ASKED, *calls]})

    # The most fit into a turn, but not into the context of this model.
    assert most.json()["error"]["code"] == "context_length_exceeded"
    assert more.status_code == 400
    assert more.json()["error"]["param"] == f"input[{len(ASKED) + MAX_CALLS}]"


async def test_a_result_continues_a_stored_call(open_house, scripts, tmp_path) -> None:
    async with open_house(scripts.says(SAID["hermes"]), files_dir=str(tmp_path)) as house:
        first = (await house.client.post(PATH, json=BODY)).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
            for call in calls
        ]
        body = {**BODY, "input": results, "previous_response_id": first["id"]}
        second = await house.client.post(PATH, json=body)
        path = f"{PATH}/{second.json()['id']}/input_items?order=asc"
        listed = (await house.client.get(path)).json()["data"]

    assert second.status_code == 200, second.text
    assert second.headers.get("x-moesaic-ignored", SWITCH) == SWITCH
    assert [item["type"] for item in listed] == [
        *("message", "reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output"),
    ]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([FLAT[1], FLAT[1]], "tools"),
        ([{**FLAT[1], "strict": True, "parameters": {"not": {}}}], "tools[0].parameters"),
    ],
)
async def test_a_mistake_in_a_tool_is_named_where_it_is(open_house, scripts, tools, param) -> None:
    async with open_house(scripts.says("yes")) as house:
        answer = await house.client.post(PATH, json={"input": "a", "tools": tools})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert ".function." not in answer.json()["error"]["message"]
