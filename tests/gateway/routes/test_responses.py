"""``/v1/responses`` on a real gateway, by OpenAI's client: answers, events, errors."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.errors import Overloaded
from moesaic.services.gateway.fields.responses import Names
from moesaic.services.gateway.language import Language
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.batches.batch_client import connect, talk
from tests.gateway.conftest import Scripts

SAID = "this is a story"


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under the name that it has."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def post(house, **body: Any) -> Any:
    return await house.client.post("/v1/responses", json={"input": "hello", **body})


async def test_the_client_gets_text_and_tokens(open_house, scripts) -> None:
    async with open_house(scripts.says(SAID)) as house:
        response = await talk(
            house,
            lambda client: client.responses.create(
                model="tiny",
                input="hello",
                instructions="hello world",
                temperature=0.5,
                metadata={"a": "b"},
            ),
        )

    assert (response.status, response.output_text) == ("completed", SAID)
    assert (response.temperature, response.top_p, response.metadata) == (0.5, 1, {"a": "b"})
    assert response.usage.output_tokens == len(scripts.ids(SAID)) + 1
    assert response.completed_at is not None
    assert response.store is False


async def test_a_stream_tells_each_step_and_ends_with_the_whole(open_house, scripts) -> None:
    async with open_house(scripts.says(SAID)) as house:
        streamed = await post(house, stream=True)

    events = events_of(streamed.text)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event.get("delta", "") for event in events) == SAID
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert events[0]["response"]["output"] == []
    assert events[-2]["item"]["content"][0]["text"] == SAID


async def test_items_become_the_turns_of_a_chat(open_house, scripts) -> None:
    parts = [{"type": "input_text", "text": "hello"}]
    items = [
        {"role": "user", "content": "yes"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "no", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "developer", "content": parts},
    ]
    turns = [
        {"role": "system", "content": "music"},
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "no"},
        {"role": "system", "content": "hello"},
    ]
    async with open_house(scripts.says("yes")) as house:
        answer = await post(house, input=items, instructions="music", max_output_tokens=7)
        await house.client.post("/v1/chat/completions", json={"messages": turns})
        [as_items, as_turns] = house.workers[0].submits

    assert answer.status_code == 200, answer.text
    assert "x-moesaic-ignored" not in answer.headers
    assert as_items.token_ids == as_turns.token_ids
    assert as_items.generation.max_tokens == 7


async def test_instructions_are_one_message_for_templates_that_read_only_the_first(
    open_house, scripts
) -> None:
    parts = [{"type": "input_text", "text": "hello"}, {"type": "input_text", "text": "world"}]
    items = [
        {"role": "developer", "content": parts},
        {"role": "system", "content": "yes"},
        {"role": "user", "content": "no"},
        {"role": "developer", "content": "music"},
    ]
    turns = [
        {"role": "system", "content": "story\n\nhello\nworld\n\nyes"},
        {"role": "user", "content": "no"},
        {"role": "system", "content": "music"},
    ]
    async with open_house(scripts.says("yes")) as house:
        answer = await post(house, input=items, instructions="story")
        await house.client.post("/v1/chat/completions", json={"messages": turns})
        [as_items, as_turns] = house.workers[0].submits

    assert answer.status_code == 200, answer.text
    assert as_items.token_ids == as_turns.token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(open_house, scripts, stream: bool) -> None:
    async with open_house(scripts.says(SAID, stop=False)) as house:
        answer = await post(house, max_output_tokens=2, stream=stream)

    if stream:
        last = events_of(answer.text)[-1]
        assert last["type"] == "response.incomplete"
    response = last["response"] if stream else answer.json()
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 2


async def test_a_response_that_fails_on_its_way_ends_with_the_event_for_it(
    open_house, scripts
) -> None:
    async def script(submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=scripts.ids("yes")))
        await seen.wait()
        failure = {"code": "expert_unavailable", "message": "layer 3", "http_status": 503}
        emit(failure=pb.Failure(**failure, retryable=True))

    seen = asyncio.Event()
    async with open_house(script) as house:
        body = {"input": "hello", "stream": True}
        async with house.client.stream("POST", "/v1/responses", json=body) as streamed:
            text = ""
            async for piece in streamed.aiter_text():
                text += piece
                if "output_text.delta" in text:
                    seen.set()

    events = events_of(text)
    failed = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert failed["error"] == {"code": "server_error", "message": "layer 3 (expert_unavailable)"}
    assert failed["output"][0]["content"][0]["text"] == "yes"
    assert failed["output"][0]["status"] == "incomplete"


async def test_a_response_that_fails_at_once_is_a_plain_error(open_house, scripts) -> None:
    failure = {"code": "expert_unavailable", "message": "layer 3", "http_status": 503}
    async with open_house(scripts.fails(**failure, retryable=True)) as house:
        answer = await post(house, stream=True)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "expert_unavailable")


async def test_log_probabilities_stand_beside_the_text(open_house, scripts) -> None:
    async with open_house(scripts.says(SAID)) as house:
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        whole = await post(house, include=include)
        streamed = await post(house, top_logprobs=1, stream=True)

    told = whole.json()["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in told).startswith(SAID)
    assert whole.headers["x-moesaic-ignored"] == "include"
    done = next(e for e in events_of(streamed.text) if e["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]] == [entry["token"] for entry in told]


CALL = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "noon"}
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": []}, "input", "invalid_request"),
        ({"input": 5}, "input", "invalid_request"),
        ({"input": [5]}, "input[0]", "invalid_request"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_request"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_request"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_request"),
        ({"input": IMAGE}, "input[0].content", "unsupported_parameter"),
        ({"instructions": "a", "input": IMAGE}, "input[0].content", "unsupported_parameter"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [OUTPUT]}, "input[0].call_id", "invalid_request"),
        ({"input": [CALL, {**OUTPUT, "output": None}]}, "input[1].output", "invalid_request"),
        ({"input": [{**CALL, "arguments": None}]}, "input[0].arguments", "invalid_request"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id", "invalid_request"),
        ({"input": "a " * 500}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"return_token_ids": True}, "return_token_ids", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_parameter"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "invalid_request",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_request"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_request"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "invalid_request"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_request"),
        (
            {"text": {"format": {"type": "json_schema", "strict": True, "schema": SCHEMA}}},
            "text.format",
            "unsupported_parameter",
        ),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_request"),
        ({"metadata": {"a": 5}}, "metadata.a", "invalid_request"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_request"),
        ({"model": "gpt"}, "model", "model_not_found"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "route_not_enabled"),
    ],
)
async def test_an_error_names_the_field_of_this_body(
    open_house, scripts, body: dict[str, Any], param: str, code: str
) -> None:
    async with open_house(scripts.says("yes")) as house:
        answer = await post(house, **body)

    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert answer.status_code == (404 if code in ("model_not_found", "route_not_enabled") else 400)
    assert not error["message"].startswith("messages")


async def test_a_field_that_a_worker_refuses_is_named_as_here(open_house, scripts) -> None:
    failure = {"code": "invalid_request", "message": "no", "http_status": 400}
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    async with open_house(scripts.fails(**failure, field="response_format")) as house:
        answers = [await post(house, text=form, stream=stream) for stream in (False, True)]

    assert [answer.json()["error"]["param"] for answer in answers] == ["text.format"] * 2


async def test_an_error_that_others_are_told_too_keeps_its_field(
    open_house, model_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    chat = {"messages": [{"role": "user", "content": "a"}]}

    async with open_house(Scripts.silent, language=Language(tmp_path)) as house:
        as_response = await post(house)
        as_chat = await house.client.post("/v1/chat/completions", json=chat)

    assert as_response.json()["error"]["param"] == "input"
    assert as_chat.json()["error"]["param"] == "messages"
    assert as_chat.json()["error"]["message"].startswith("messages: this model has no chat")


def test_an_error_of_several_is_raised_as_a_copy_and_only_its_own_words_change() -> None:
    shared = Overloaded("full")
    vars(shared).update(field="tools[1].function.name")
    shared.args = ("tools: tools[1].function.name: 'messages[0].content' appears twice",)

    with pytest.raises(Overloaded) as caught, Names().told():
        raise shared

    assert shared.args[0].startswith("tools: tools[1].function.name: ")
    assert vars(caught.value) == {**vars(shared), "field": "tools[1].name"}
    assert str(caught.value) == "tools: tools[1].name: 'messages[0].content' appears twice"


async def test_what_is_ignored_is_named(open_house, scripts) -> None:
    body = {"store": True, "reasoning": {"effort": "high", "summary": "auto"}, "max_tool_calls": 3}
    async with open_house(scripts.says("yes")) as house:
        answer = await post(house, **body, text={"verbosity": "low"}, truncation="disabled")

    ignored = "max_tool_calls, reasoning.summary, reasoning.effort, text.verbosity, store"
    assert sorted(answer.headers["x-moesaic-ignored"].split(", ")) == sorted(ignored.split(", "))
    assert answer.json()["store"] is False


async def test_a_class_of_pydantics_is_parsed(open_house, scripts, language) -> None:
    import pydantic

    class Place(pydantic.BaseModel):
        city: str

    said = '{"city":"a"}'
    async with open_house(scripts.says(said)) as house:
        parsed = await talk(
            house,
            lambda client: client.responses.parse(model="tiny", input="hello", text_format=Place),
        )
        grammar = house.workers[0].submits[0].generation.grammar

    assert parsed.output_parsed == Place(city="a")
    assert "city" in grammar.json_schema
    assert parsed.text.format.name == "Place"


async def test_the_client_follows_a_stream_and_raises_our_errors(open_house, scripts) -> None:
    def read(client: openai.OpenAI) -> Any:
        with client.responses.stream(model="tiny", input="hello") as stream:
            texts = [e.delta for e in stream if e.type == "response.output_text.delta"]
            return "".join(texts), stream.get_final_response().output_text

    async with open_house(scripts.says(SAID)) as house:
        assert await talk(house, read) == (SAID, SAID)
        with connect(house) as client, pytest.raises(openai.BadRequestError) as caught:
            await asyncio.to_thread(client.responses.create, input="a", temperature=9)

    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_request")
