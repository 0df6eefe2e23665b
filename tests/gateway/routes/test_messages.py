"""Anthropic's API: fields, ends of an answer, tokens, and errors of every kind in its own form."""

import asyncio
import json
from typing import Any

import pytest

from moesaic.api_keys import digest_of
from moesaic.services.gateway.generate import anthropic_answer
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.conftest import MAX_POSITIONS

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hello"}],
}


def error_of(response: Any) -> Any:
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return body["error"]


async def test_a_message_asks_workers_for_what_a_chat_asks(open_house, scripts) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 7}
    async with open_house(scripts.says("yes no")) as house:
        fields = {**BODY, **sampling, "system": "hello", "stop_sequences": ["no"]}
        message = (await house.client.post(PATH, json=fields)).json()
        turns = [{"role": "system", "content": "hello"}, *BODY["messages"]]
        chat = {**BODY, **sampling, "messages": turns, "stop": "no"}
        chatted = (await house.client.post("/v1/chat/completions", json=chat)).json()
        first, second = house.workers[0].submits

    assert first.token_ids == second.token_ids
    for submit in (first, second):
        submit.generation.sampling.seed = 0
    assert first.generation == second.generation
    assert message["content"][0]["text"] == chatted["choices"][0]["message"]["content"] == "yes "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "no")


@pytest.mark.parametrize(
    ("stop", "body", "reason"),
    [
        (True, {}, "end_turn"),
        (False, {}, "max_tokens"),
        (False, {"max_tokens": MAX_POSITIONS}, "model_context_window_exceeded"),
        (True, {"max_tokens": 1 << 20}, "end_turn"),
    ],
)
async def test_an_answer_says_why_it_ended(open_house, scripts, stop, body, reason: str) -> None:
    async with open_house(scripts.says("yes", stop=stop)) as house:
        response = await house.client.post(PATH, json={**BODY, **body})
        [submit] = house.workers[0].submits

    assert response.json()["stop_reason"] == reason
    assert submit.generation.max_tokens + len(submit.token_ids) <= MAX_POSITIONS


async def test_tokens_that_were_computed_before_are_counted_apart(open_house, scripts) -> None:
    async def script(submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=scripts.ids("yes")))
        finished = scripts.finished(submit, 1)
        finished.cached_tokens = 2
        emit(finished=finished)

    async with open_house(script) as house:
        whole = (await house.client.post(PATH, json=BODY)).json()
        text = (await house.client.post(PATH, json={**BODY, "stream": True})).text
        counted = (
            await house.client.post(f"{PATH}/count_tokens", json={"messages": BODY["messages"]})
        ).json()
        prompt = house.workers[0].submits[0].token_ids

    usage = whole["usage"]
    [told] = [json.loads(line[6:]) for line in text.splitlines() if '"message_delta"' in line[:40]]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] == len(prompt) - 2
    assert usage["output_tokens"] == 2
    assert told["usage"] == usage
    assert counted == {"input_tokens": len(prompt)}


async def test_an_assistants_last_turn_is_continued(open_house, scripts) -> None:
    turns = [*BODY["messages"], {"role": "assistant", "content": "this is"}]
    async with open_house(scripts.says(" a story")) as house:
        answer = (await house.client.post(PATH, json={**BODY, "messages": turns})).json()
        [submit] = house.workers[0].submits

    prompt = scripts.language.tokenizer.decode(list(submit.token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nthis is")
    assert answer["content"][0]["text"] == " a story"


async def test_a_format_is_a_schema_of_the_whole_answer(open_house, scripts) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    output = {"format": {"type": "json_schema", "schema": schema}}
    async with open_house(scripts.says("yes")) as house:
        await house.client.post(PATH, json={**BODY, "output_config": output})
        grammar = house.workers[0].submits[0].generation.grammar

    assert json.loads(grammar.json_schema)["properties"].keys() == {"a"}


async def test_fields_without_an_effect_are_passed_over_and_others_named(
    open_house, scripts
) -> None:
    quiet = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "stream": None,
    }
    loud = {"context_management": {"edits": []}, "output_config": {"effort": "low"}}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    async with open_house(scripts.says("yes")) as house:
        silent = await house.client.post(f"{PATH}?beta=true", json=BODY | quiet, headers=headers)
        told = await house.client.post(PATH, json=BODY | loud)

    assert silent.status_code == told.status_code == 200
    assert "x-moesaic-ignored" not in silent.headers
    assert told.headers["x-moesaic-ignored"] == "context_management, output_config.effort"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 2}, "n"),
        ({"min_p": 0.5}, "min_p"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_named(
    open_house, scripts, change, param: str
) -> None:
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post(PATH, json=BODY | change)
        submits = house.workers[0].submits

    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["details"]["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert submits == []


async def test_many_turns_are_an_error_of_the_callers(open_house, scripts) -> None:
    call = {"type": "tool_use", "name": "f", "input": {}}
    ids = [f"c{i}" for i in range(5000)]
    turns = [
        *BODY["messages"],
        {"role": "assistant", "content": [{**call, "id": one} for one in ids]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one} for one in ids]},
    ]
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post(PATH, json={**BODY, "messages": turns})

    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_a_prompt_that_does_not_fit_is_told_in_words_that_clients_know(
    open_house, scripts
) -> None:
    turns = [{"role": "user", "content": "hello " * MAX_POSITIONS}]
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post(PATH, json={**BODY, "messages": turns})
        counted = await house.client.post(f"{PATH}/count_tokens", json={"messages": turns})

    assert response.status_code == 400
    assert error_of(response)["message"].startswith("prompt is too long: messages: ")
    assert counted.json()["input_tokens"] > MAX_POSITIONS


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("POST", PATH, 400, "invalid_request_error"),
        ("POST", f"{PATH}/count_tokens", 400, "invalid_request_error"),
    ],
)
async def test_errors_without_a_route_have_the_same_form(
    open_house, method, path, status: int, kind: str
) -> None:
    async with open_house() as house:
        response = await house.client.request(method, path)

    assert response.status_code == status
    assert error_of(response)["type"] == kind


async def test_errors_have_the_type_of_their_status(open_house, scripts, tmp_path) -> None:
    keys = tmp_path / "keys.json"
    limited = {"name": "a", "keys": [digest_of("a")], "scopes": ["infer"]}
    entries = [
        {**limited, "requests_per_minute": 1},
        {"name": "b", "keys": [digest_of("b")], "scopes": ["batch"]},
        {"name": "c", "keys": [digest_of("c")], "scopes": ["infer"]},
    ]
    keys.write_text(json.dumps({"tenants": entries}))

    async with open_house(
        scripts.says("yes"), api_keys_file=str(keys), max_body_bytes=5000
    ) as house:

        async def told(headers: Any, body: Any = BODY) -> tuple[int, str]:
            response = await house.client.post(PATH, json=body, headers=headers)
            return response.status_code, response.status_code < 400 or error_of(response)["type"]

        large = {**BODY, "system": "a" * 5000}
        assert await told({}) == (401, "authentication_error")
        assert await told({"x-api-key": "z"}) == (401, "authentication_error")
        assert await told({"x-api-key": "b"}) == (403, "permission_error")
        assert await told({"x-api-key": "a"}) == (200, True)
        assert await told({"x-api-key": "a"}) == (429, "rate_limit_error")
        assert await told({"authorization": "Bearer c"}) == (200, True)
        assert await told({"x-api-key": "c"}, {**BODY, "model": "m"}) == (404, "not_found_error")
        assert await told({"x-api-key": "c"}, large) == (413, "request_too_large")
        # As behind a proxy that has its own.
        both = {"x-api-key": "c", "authorization": "Bearer z"}
        assert await told(both) == (200, True)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        ({"code": "overloaded", "http_status": 503, "retryable": True}, 529, "overloaded_error"),
        ({"code": "not_ready", "http_status": 503, "retryable": True}, 503, "api_error"),
        ({"code": "deadline_exceeded", "http_status": 504}, 504, "timeout_error"),
        ({"code": "internal_error", "http_status": 500}, 500, "api_error"),
    ],
)
async def test_failures_of_workers_have_the_type_of_their_status(
    open_house, scripts, failure, status: int, kind: str
) -> None:
    script = scripts.fails(message="it failed", **failure)
    async with open_house(script) as house:
        response = await house.client.post(PATH, json=BODY)

    assert response.status_code == status
    assert error_of(response)["type"] == kind


async def test_a_failure_within_a_stream_is_its_last_event(open_house, scripts) -> None:
    async def script(submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=scripts.ids("yes")))
        emit(failure=pb.Failure(code="bad", message="it failed", http_status=400))

    async with open_house(script) as house:
        response = await house.client.post(PATH, json={**BODY, "stream": True})

    assert response.status_code == 200
    name, data = response.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["request_id"] == response.headers["request-id"]
    assert "[DONE]" not in response.text
    assert "message_stop" not in response.text


async def test_silence_is_filled_with_pings(open_house, scripts, monkeypatch) -> None:
    monkeypatch.setattr(anthropic_answer, "KEEP_ALIVE_S", 0.01)
    heard = asyncio.Event()

    async def script(submit, emit) -> None:
        await heard.wait()
        emit(finished=scripts.finished(submit, 0))

    async with open_house(script) as house:
        lines = []
        async with house.client.stream("POST", PATH, json={**BODY, "stream": True}) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) > 5:
                    heard.set()

    assert lines[:3] == ["event: ping", 'data: {"type":"ping"}', ""]
    assert lines[-3:] == ["event: message_stop", 'data: {"type":"message_stop"}', ""]
    assert not any(line.startswith(":") for line in lines)
