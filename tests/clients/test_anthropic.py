"""The ``anthropic`` client against a real suite: messages, streams, tools, tokens, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.test_openai import num_cancelled
from tests.suites import Suite
from tests.waiting import eventually

MESSAGES: Any = [
    {"role": "user", "content": "Continue this text. The old prince came into the room"}
]
FEW = 6  # tokens, before the demo model ends its answer
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 16, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
}
ASKED: Any = {"role": "user", "content": "what will the weather be tomorrow in Rome?"}
ONE: dict[str, Any] = {
    **GREEDY,
    "max_tokens": 200,
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture
def client(suite: Suite) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=suite.url, api_key="none") as client:
        yield client


def test_a_stream_brings_what_a_whole_message_has(client: anthropic.Anthropic) -> None:
    few = {**GREEDY, "max_tokens": FEW}
    whole = client.messages.create(messages=MESSAGES, **few)
    with client.messages.stream(messages=MESSAGES, **few) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()

    [block] = whole.content
    assert block.text
    assert len(texts) > 1
    assert "".join(texts) == final.content[0].text == block.text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == FEW
    tokens = [u.input_tokens + u.cache_read_input_tokens for u in (whole.usage, final.usage)]
    assert tokens[0] == tokens[1]


async def test_the_asynchronous_client_gets_the_same_events(
    suite: Suite, client: anthropic.Anthropic
) -> None:
    expected = client.messages.create(messages=MESSAGES, **GREEDY)
    async with anthropic.AsyncAnthropic(base_url=suite.url, api_key="none") as caller:

        async def said() -> str:
            stream = await caller.messages.create(messages=MESSAGES, stream=True, **GREEDY)
            deltas = [event.delta async for event in stream if event.type == "content_block_delta"]
            return "".join(delta.text for delta in deltas)

        texts = await asyncio.gather(said(), said())

    assert texts == [expected.content[0].text] * 2


def test_tokens_are_counted_as_a_message_counts_them(client: anthropic.Anthropic) -> None:
    asked: Any = {"messages": [ASKED], "system": "Be short.", "tools": [WEATHER], "model": "demo"}
    counted = client.messages.count_tokens(**asked)
    usage = client.messages.create(max_tokens=1, **asked).usage

    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    without = client.messages.count_tokens(model="demo", messages=[ASKED])
    assert 0 < without.input_tokens < counted.input_tokens


def test_a_call_is_made_and_its_result_answered(client: anthropic.Anthropic) -> None:
    first = client.messages.create(messages=[ASKED], **ONE)
    [call] = [block for block in first.content if block.type == "tool_use"]
    turns: Any = [
        ASKED,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}],
        },
    ]
    second = client.messages.create(messages=turns, tools=[WEATHER], **GREEDY)

    assert first.stop_reason == "tool_use"
    assert call.name == "get_weather"
    assert call.input["city"] in ("Paris", "Rome")
    assert 1 <= call.input["days"] <= 9
    assert second.content[0].text
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens > sum(
        (first.usage.input_tokens, first.usage.cache_read_input_tokens)
    )


def test_a_stream_has_the_same_call_piece_by_piece(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=[ASKED], **ONE)
    with client.messages.stream(messages=[ASKED], **ONE) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()

    [call], [expected] = (
        [block for block in message.content if block.type == "tool_use"]
        for message in (final, whole)
    )
    assert call.input == expected.input
    assert len(pieces) > 2
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("error", "kind", "call"),
    [
        (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": 0}),
        (anthropic.NotFoundError, "not_found_error", {"model": "claude"}),
        (
            anthropic.BadRequestError,
            "invalid_request_error",
            {"messages": [{"role": "user", "content": "a " * 20_000}]},
        ),
    ],
)
def test_errors_have_the_class_and_the_type(
    client: anthropic.Anthropic, error: type[anthropic.APIStatusError], kind: str, call: Any
) -> None:
    with pytest.raises(error) as caught:
        client.messages.create(**{"messages": MESSAGES, **GREEDY, **call})

    assert caught.value.type == kind
    assert caught.value.request_id


def test_a_deadline_of_the_callers_ends_the_message(client: anthropic.Anthropic) -> None:
    body = {"moesaic": {"deadline_ms": 1}}
    with pytest.raises(anthropic.InternalServerError) as caught:
        client.with_options(max_retries=0).messages.create(
            model="demo", max_tokens=500, messages=MESSAGES, extra_body=body
        )

    assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")


def test_a_stream_that_is_closed_early_is_cancelled(
    suite: Suite, client: anthropic.Anthropic
) -> None:
    cancelled = num_cancelled(suite)
    # Calls follow each other to the end of the context.
    calls: Any = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 1900}
    with client.messages.stream(model="demo", messages=MESSAGES, **calls) as stream:
        assert next(iter(stream)).type == "message_start"

    eventually(lambda: num_cancelled(suite) == cancelled + 1)
