"""Tool calls with the ``openai`` client against a real suite: the demo model calls where it must."""

import json
from typing import Any

import openai
import pytest

from tests.clients.test_openai import client as client
from tests.suites import Suite

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
SWITCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "switch_light",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
        },
    },
}
TOOLS = [WEATHER, SWITCH]
ASKED = [{"role": "user", "content": "what will the weather be tomorrow in Rome?"}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 200}
END = "2"  # the demo model's token that ends a turn
ONE: dict[str, Any] = {**GREEDY, "parallel_tool_calls": False}


def check_call(name: str, arguments: str) -> None:
    """The call is one of the tools', with arguments that fit."""
    told = json.loads(arguments)
    if name == "switch_light":
        assert told in ({"on": True}, {"on": False})
    else:
        assert name == "get_weather"
        assert told.keys() == {"city", "days"}
        assert told["city"] in ("Paris", "Rome")
        assert 1 <= told["days"] <= 9


def test_a_required_call_is_made_and_answered(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        messages=ASKED, tools=TOOLS, tool_choice="required", **ONE
    )
    [choice] = first.choices
    [call] = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    turns = [
        *ASKED,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It will rain."},
    ]
    second = client.chat.completions.create(messages=turns, tools=TOOLS, **GREEDY)

    assert choice.finish_reason == "tool_calls"
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("name", ["get_weather", "switch_light"])
def test_the_function_that_is_named_is_called(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        messages=ASKED,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": name}},
        **GREEDY,
    )

    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == name
    check_call(name, call.function.arguments)


def test_several_calls_at_once_are_each_valid(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=ASKED,
        tools=TOOLS,
        tool_choice="required",
        logit_bias={END: -100},  # it goes on calling
        **GREEDY,
    )

    *calls, _ = answer.choices[0].message.tool_calls  # the last one is cut
    assert answer.choices[0].finish_reason == "length"
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        check_call(call.function.name, call.function.arguments)


def test_a_stream_has_the_same_call_piece_by_piece(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", **ONE}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        pieces = [event.arguments_delta for event in deltas]
        final = stream.get_final_completion()

    [call], [expected] = (c.choices[0].message.tool_calls for c in (final, whole))
    assert call.function.name == expected.function.name
    assert call.function.arguments == expected.function.arguments == "".join(pieces)
    assert len(pieces) > 2
    assert final.choices[0].finish_reason == "tool_calls"


def test_where_nothing_need_be_called_words_stay_words(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            messages=ASKED, tools=TOOLS, tool_choice=choice, **GREEDY
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None


def test_a_class_of_pydantic_s_is_a_tool_and_is_read_back(client: openai.OpenAI) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Light(pydantic.BaseModel):
        """Switch the light."""

        on: bool

    answer = client.chat.completions.parse(
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Light)],
        tool_choice="required",
        **ONE,
    )

    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Light)


def test_a_schema_that_cannot_be_held_is_the_tool_s(suite: Suite, client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=ASKED, tools=[tool], tool_choice="required", **GREEDY
        )

    assert caught.value.param == "tools"
