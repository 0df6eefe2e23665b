"""Calls, results and reasoning by Anthropic's API, whole and streamed, in the forms of several families."""

import json
from typing import Any

import pytest

from tests.gateway.routes.test_responses import events_of
from tests.gateway.tools.test_answers import SAID, every_family

PATH = "/v1/messages"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
ASKED = {"role": "user", "content": "weather in Paris?"}
CALL = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
BODY: dict[str, Any] = {
    "model": None,
    "max_tokens": 2000,
    "messages": [ASKED],
    "tools": [WEATHER, NOW],
    "thinking": {"type": "adaptive"},
}


def accumulated(told: list[Any]) -> Any:
    """Put a stream together as clients do: blocks one after another, each begun and ended."""
    assert told[0]["type"] == "message_start"
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    message, texts, is_open = told[0]["message"], list[str](), False
    assert message["content"] == []
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": ""}
    for event in told[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            message["content"].append(event["content_block"])
            texts, is_open = [], True
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(texts))
            continue
        delta = event["delta"]
        if delta["type"] == "signature_delta":
            continue
        field = fields[delta["type"]]
        if field:
            block[field] += delta[field]
        else:
            texts.append(delta["partial_json"])
    assert not is_open
    end = told[-2]
    return {**message, **end["delta"], "usage": end["usage"], "moesaic": end["moesaic"]}


def without_ids(message: Any) -> Any:
    content = [{**block, "id": "call"} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": content}


@every_family
async def test_a_whole_answer_has_its_blocks_in_order(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        answer = (await house.client.post(PATH, json=BODY)).json()

    assert next(iter(answer)) == "type"
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["id"].startswith("msg_")
    assert answer["stop_reason"] == "tool_use"
    assert answer["stop_sequence"] is None
    thinking, text, *calls = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "it asks", "signature": ""}
    # The AI SDK takes no null for citations, and Anthropic sends none.
    assert text == {"type": "text", "text": "I look."}
    assert [call["type"] for call in calls] == ["tool_use", "tool_use"]
    told = [(call["name"], call["input"]) for call in calls]
    assert told == [("get_weather", {"city": "Paris"}), ("now", {})]
    assert calls[0]["id"] != calls[1]["id"]
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


@every_family
async def test_a_stream_brings_the_same_message(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        streamed = await house.client.post(PATH, json={**BODY, "stream": True})
        whole = (await house.client.post(PATH, json=BODY)).json()

    told = events_of(streamed.text)
    starts = [e["content_block"] for e in told if e["type"] == "content_block_start"]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert {block.get("text", "") + block.get("thinking", "") for block in starts} == {""}
    assert all(block["input"] == {} for block in starts if block["type"] == "tool_use")
    assert without_ids(accumulated(told)) == without_ids(whole)


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_empty_or_absent_on_demand(open_house, scripts, stream: bool) -> None:
    async def answer(thinking: Any) -> Any:
        body = {**BODY, "thinking": thinking, "stream": stream}
        response = await house.client.post(PATH, json=body)
        return accumulated(events_of(response.text)) if stream else response.json()

    async with open_house(scripts.says(SAID["hermes"])) as house:
        omitted = await answer({"type": "adaptive", "display": "omitted"})
        disabled = await answer({"type": "disabled"})

    assert omitted["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [block["type"] for block in disabled["content"]] == ["text", "tool_use", "tool_use"]


async def test_thinking_is_switched_in_the_template(open_house, scripts, language) -> None:
    async with open_house(scripts.says("yes")) as house:
        for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}):
            response = await house.client.post(PATH, json={**BODY, "thinking": thinking})
        off, on = (prompt_of(submit, language) for submit in house.workers[0].submits)

    assert off == f"{on}<think>\n\n</think>"
    assert response.headers["x-moesaic-ignored"] == "thinking.budget_tokens"


def prompt_of(submit: Any, language: Any) -> str:
    return str(language.tokenizer.decode(list(submit.token_ids), skip_special_tokens=False))


async def test_a_conversation_reaches_the_template_in_its_order(
    open_house, scripts, language
) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "weather"}]},
        {"role": "user", "content": "in Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "it asks", "signature": "x"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I look."},
                {**CALL, "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "go on"},
    ]
    system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    async with open_house(scripts.says("yes")) as house:
        body = {**BODY, "messages": turns, "system": system}
        response = await house.client.post(PATH, json=body)
        counted = await house.client.post(
            f"{PATH}/count_tokens", json={k: body[k] for k in body if k != "max_tokens"}
        )
        [submit] = house.workers[0].submits

    assert response.status_code == 200, response.text
    assert "x-moesaic-ignored" not in response.headers
    tools, *turns = prompt_of(submit, language).split("<|im_start|>")[1:]
    assert '"name": "get_weather"' in tools
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert turns == [
        "system\nbe kind<|im_end|>",
        "user\nweather\nin Paris?<|im_end|>",
        f"assistant\nI look.<think>it asks</think>{call}<|im_end|>",
        "tool\nrain<|im_end|>",
        "user\nand now?<|im_end|>",
        "system\nbe short<|im_end|>",
        "user\ngo on<|im_end|>",
        "assistant",
    ]
    usage = response.json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize(
    ("choice", "names", "many"),
    [
        ({"type": "any"}, {"get_weather", "now"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "now"}, False),
        ({"type": "tool", "name": "now"}, {"now"}, True),
    ],
)
async def test_a_choice_binds_the_answer_to_its_tools(
    open_house, scripts, choice, names, many: bool
) -> None:
    async with open_house(scripts.says(SAID["hermes"])) as house:
        response = await house.client.post(PATH, json={**BODY, "tool_choice": choice})
        grammar = house.workers[0].submits[0].generation.grammar.grammar

    calls = [block for block in response.json()["content"] if block["type"] == "tool_use"]
    assert {name for name in ("get_weather", "now") if name in grammar} == names
    assert len(calls) == (2 if many else 1)


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "none"}])
async def test_a_free_choice_binds_nothing(open_house, scripts, choice, language) -> None:
    async with open_house(scripts.says("yes")) as house:
        await house.client.post(PATH, json={**BODY, "tool_choice": choice})
        [submit] = house.workers[0].submits

    assert not submit.generation.HasField("grammar")
    shown = "get_weather" in prompt_of(submit, language)
    assert shown == (choice != {"type": "none"})


async def test_arguments_that_were_cut_are_given_as_far_as_they_came(open_house, scripts) -> None:
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    async with open_house(scripts.says(said, stop=False)) as house:
        answer = (await house.client.post(PATH, json=BODY)).json()

    [call] = answer["content"]
    assert call["input"] == {"city": "Par"}
    assert answer["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("turns", "place", "said"),
    [
        ([{"role": "assistant", "content": [CALL]}], "messages[1].content[0]", "tool_result"),
        (
            [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": "well?"}],
            "messages[2].content",
            "call_1",
        ),
        ([{"role": "user", "content": [RESULT]}], "messages[1].content[0].tool_use_id", "names no"),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [RESULT, RESULT]},
            ],
            "messages[2].content[1].tool_use_id",
            "names no",
        ),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": "wait"},
                {"role": "user", "content": [RESULT]},
            ],
            "messages[3].content[0]",
            "come first",
        ),
        (
            [
                {"role": "assistant", "content": [CALL, {**CALL, "id": "b"}]},
                {
                    "role": "user",
                    "content": [
                        RESULT,
                        {"type": "text", "text": "a"},
                        {**RESULT, "tool_use_id": "b"},
                    ],
                },
            ],
            "messages[2].content[2]",
            "come first",
        ),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "assistant", "content": [{**CALL, "name": "now"}]},
                {"role": "user", "content": [RESULT]},
            ],
            "messages[2].content[0].id",
            "another tool_use",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "source": {}}]}],
            "messages[1].content[0]",
            "'image' is not supported",
        ),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{**RESULT, "content": [{"type": "document"}]}]},
            ],
            "messages[2].content[0].content[0]",
            "'document' is not supported",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now"}]}],
            "messages[1].content[0].input",
            "required",
        ),
        ([{"role": "user", "content": [CALL]}], "messages[1].content[0]", "role user"),
        ([{"role": "tool", "content": "x"}], "messages[1].role", "'user'"),
    ],
)
async def test_turns_that_do_not_fit_are_refused_by_their_place(
    open_house, scripts, turns, place: str, said: str
) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {**BODY, "messages": [ASKED, *turns]}
        response = await house.client.post(PATH, json=body)
        submits = house.workers[0].submits

    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["details"]["param"] == place
    assert error["message"].startswith(f"{place}: ")
    assert said in error["message"]
    assert submits == []


async def test_a_failed_tool_is_told_as_far_as_a_template_can(open_house, scripts) -> None:
    turns = [
        ASKED,
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{**RESULT, "is_error": True}]},
    ]
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post(PATH, json={**BODY, "messages": turns})

    assert response.status_code == 200
    assert response.headers["x-moesaic-ignored"] == "messages.content.is_error"


async def test_a_strict_schema_that_no_grammar_holds_is_named_as_the_tools(
    open_house, scripts
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    tool = {"name": "f", "input_schema": schema}
    async with open_house(scripts.says("yes")) as house:
        strict = await house.client.post(PATH, json={**BODY, "tools": [{**tool, "strict": True}]})
        body = {**BODY, "tools": [tool], "tool_choice": {"type": "any"}}
        loose = await house.client.post(PATH, json=body)

    assert strict.json()["error"]["details"]["param"] == "tools[0].input_schema"
    assert strict.json()["error"]["message"].startswith("tools[0].input_schema: no grammar")
    assert loose.headers["x-moesaic-ignored"] == "tools[0].input_schema: uniqueItems"
