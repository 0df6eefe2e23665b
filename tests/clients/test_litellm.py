"""LiteLLM against a real suite: chats, streams, tools, the other two APIs and its bridges, errors."""

import json
from typing import Any

import pytest

from tests.suites import Suite

litellm = pytest.importorskip("litellm", reason="make test-clients installs it")

MESSAGES = [{"role": "user", "content": "Continue this text. The old prince came into the room"}]
ASKED = [{"role": "user", "content": "what will the weather be tomorrow in Rome?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


def fields_of(suite: Suite, provider: str, **more: Any) -> dict[str, Any]:
    base = suite.url if provider == "anthropic" else f"{suite.url}/v1"
    shared = {"api_base": base, "api_key": "none", "temperature": 0, "num_retries": 0}
    return {"model": f"{provider}/demo", **shared, **more}


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_stream_has_the_text_of_a_whole_chat(suite: Suite, provider: str) -> None:
    fields = fields_of(suite, provider, messages=MESSAGES, max_tokens=6)
    whole = await litellm.acompletion(**fields)
    stream = await litellm.acompletion(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_is_made_and_answered(suite: Suite, provider: str) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    fields = fields_of(suite, provider, max_tokens=64, tools=tools)
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    turn = litellm.completion(messages=ASKED, **fields, **more).choices[0].message
    [call] = turn.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    answer = litellm.completion(messages=[*ASKED, turn.model_dump(), result], **fields)

    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert answer.choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_responses_come_by_each_provider(suite: Suite, provider: str) -> None:
    fields = fields_of(suite, provider, input=MESSAGES[0]["content"], max_output_tokens=12)
    whole = await litellm.aresponses(**fields)
    stream = await litellm.aresponses(**fields, stream=True)
    deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]

    texts = [part.text for item in whole.output for part in item.content]
    assert "".join(deltas) == "".join(texts) != ""


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_messages_of_anthropic_come_by_each_provider(suite: Suite, provider: str) -> None:
    fields = fields_of(suite, provider, messages=MESSAGES, max_tokens=12)
    answer = await litellm.anthropic.messages.acreate(**fields)
    chat = await litellm.acompletion(**fields)

    assert "".join(block["text"] for block in answer["content"]) == chat.choices[0].message.content
    assert answer["usage"]["output_tokens"] == chat.usage.completion_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_errors_have_its_classes(suite: Suite, provider: str) -> None:
    long = [{"role": "user", "content": "a " * 20_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**fields_of(suite, provider, messages=long, max_tokens=4))
    other = fields_of(suite, provider, messages=MESSAGES, max_tokens=4)
    other["model"] = f"{provider}/other"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**other)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**fields_of(suite, provider, messages=[], max_tokens=4))
