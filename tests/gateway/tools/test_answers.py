"""Calls and reasoning in answers, whole and streamed."""

import json
from typing import Any

import pytest

from tests.gateway.tools.conftest import ASKED, NOW, TOOL

SAID = {
    "hermes": "<think>\nit asks\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "deepseek": "it asks</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
    '<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>analysis<|message|>it asks<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|end|><|start|>assistant'
    "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
}
BODY: dict[str, Any] = {
    "messages": ASKED,
    "tools": [TOOL, NOW],
    "chat_template_kwargs": {"thinking": True},
}
PATH = "/v1/chat/completions"
every_family = pytest.mark.parametrize("family", SAID)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def accumulated(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the deltas of a choice together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                message[name] += delta.get(name) or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"]
                    assert call["function"]["name"]
                    message["tool_calls"].append({**call["function"], "id": call["id"]})
                else:
                    assert call.keys() == {"index", "function"}
                    message["tool_calls"][call["index"]]["arguments"] += call["function"][
                        "arguments"
                    ]
    return message


@every_family
async def test_a_whole_answer_has_its_parts(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        answer = (await house.client.post(PATH, json=BODY)).json()

    [choice] = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I look."
    assert message["reasoning"] == message["reasoning_content"] == "it asks"
    assert [call["type"] for call in message["tool_calls"]] == ["function", "function"]
    told = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert told == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < answer["usage"]["completion_tokens"]


@every_family
async def test_a_stream_has_the_same_parts_and_no_marker(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        response = await house.client.post(PATH, json={**BODY, **options})
        whole = (await house.client.post(PATH, json=BODY)).json()

    chunks = events(response.text)
    # Even an empty text before a call begins a text for clients.
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    message = accumulated(chunks)
    assert message["content"] == "I look."
    assert message["reasoning"] == "it asks"
    calls = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    assert calls == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert chunks[-1]["usage"] == whole["usage"]
    told = [c["logprobs"]["content"] for e in chunks for c in e["choices"] if c.get("logprobs")]
    assert sum(map(len, told)) == whole["usage"]["completion_tokens"]


@every_family
async def test_one_call_at_most_ends_the_answer_with_the_first(
    open_house, scripts, family: str
) -> None:
    async with open_house(scripts.says(SAID[family], gap_s=0.001)) as house:
        body = {**BODY, "parallel_tool_calls": False}
        [choice] = (await house.client.post(PATH, json=body)).json()["choices"]
        await house.workers[0].cancels.get()

    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"


@every_family
async def test_without_tools_only_the_reasoning_is_set_apart(
    open_house, scripts, family: str
) -> None:
    body = {"messages": ASKED, "chat_template_kwargs": {"thinking": True}}
    async with open_house(scripts.says(SAID[family])) as house:
        [choice] = (await house.client.post(PATH, json=body)).json()["choices"]
        hidden = {**body, "include_reasoning": False}
        [bare] = (await house.client.post(PATH, json=hidden)).json()["choices"]

    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning"] == "it asks"
    assert choice["message"]["content"].startswith("I look.")
    assert "tool_calls" not in choice["message"]
    assert "reasoning" not in bare["message"]
    assert bare["message"]["content"] == choice["message"]["content"]


async def test_each_of_several_answers_has_calls_of_its_own(open_house, scripts) -> None:
    async with open_house(scripts.says(SAID["hermes"])) as house:
        body = {**BODY, "n": 2, "stream": True}
        chunks = events((await house.client.post(PATH, json=body)).text)

    for index in range(2):
        own = [
            {"choices": [c for c in chunk["choices"] if c["index"] == index]} for chunk in chunks
        ]
        assert len(accumulated(own)["tool_calls"]) == 2


async def test_an_answer_that_is_cut_says_so(open_house, scripts) -> None:
    cut = SAID["hermes"][:-60]
    async with open_house(scripts.says(cut, stop=False)) as house:
        [choice] = (await house.client.post(PATH, json=BODY)).json()["choices"]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_words_that_only_look_like_a_call_stay_content(open_house, scripts) -> None:
    text = "I would write <tool_call>get_weather</tool_call> here."
    async with open_house(scripts.says(text)) as house:
        [choice] = (await house.client.post(PATH, json=BODY)).json()["choices"]
        response = await house.client.post(PATH, json={**BODY, "stream": True})

    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert accumulated(events(response.text))["content"] == text
