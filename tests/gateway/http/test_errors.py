import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.services.gateway.http.problems import internal_error, problem_of

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    return body["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1/completions", 400, "invalid_request"),
    ],
)
async def test_every_route_answers_errors_in_one_shape(
    open_house, method, path, status, code
) -> None:
    async with open_house() as house:
        response = await house.client.request(method, path)

    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert response.headers["x-should-retry"] == "false"


async def test_who_opens_a_page_that_is_not_there_is_shown_the_way(open_house) -> None:
    async with open_house() as house:
        response = await house.client.get("/")
        shown = await house.client.get("/docs")

    assert error_of(response)["message"] == "no route GET /; /docs lists those there are"
    assert shown.status_code == 200


PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "classify": "/v1/classify",
}
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
TOOL = {"type": "function", "function": {"name": "now"}}
MANY = [f"l{i}" for i in range(27)]
BAD_FIELDS = [
    ("chat", {"messages": []}, "messages", "invalid_request"),
    ("chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "invalid_request"),
    ("chat", {**CHAT, "temperature": 3}, "temperature", "invalid_request"),
    ("chat", {**CHAT, "n": 65}, "n", "invalid_request"),
    ("chat", {**CHAT, "seed": 1 << 63}, "seed", "invalid_request"),
    ("chat", {**CHAT, "stop": ["a"] * 65}, "stop", "invalid_request"),
    ("chat", {**CHAT, "stop": ""}, "stop", "invalid_request"),
    ("chat", {**CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_request"),
    ("chat", {**CHAT, "top_logprobs": 2}, "top_logprobs", "invalid_request"),
    ("chat", {**CHAT, "tools": [{}]}, "tools[0].type", "invalid_request"),
    ("chat", {**CHAT, "tools": [TOOL]}, "tools", "unsupported_parameter"),  # its template takes none
    ("chat", {**CHAT, "tools": [TOOL], "tool_choice": "any"}, "tool_choice", "invalid_request"),
    ("chat", {**CHAT, "tool_choice": "required"}, "tool_choice", "invalid_request"),
    ("completions", {"prompt": "a", "tools": [TOOL]}, "tools", "unsupported_parameter"),
    ("chat", {**CHAT, "response_format": {"type": "json"}}, "response_format.type", "invalid_request"),
    ("chat", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_request"),
    ("chat", {**CHAT, "guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_request"),
    ("chat", {**CHAT, "guided_choice": []}, "guided_choice", "invalid_request"),
    ("chat", {**CHAT, "guided_regex": "a", "min_tokens": 2}, "min_tokens", "invalid_request"),
    ("chat", {**CHAT, "guided_regex": "a" * 200_001}, "guided_regex", "invalid_request"),
    ("chat", {**CHAT, "structured_outputs": {"tag": "a"}}, "structured_outputs.tag", "unsupported_parameter"),
    ("chat", {**CHAT, "frequency_penalty": 2.5}, "frequency_penalty", "invalid_request"),
    ("chat", {**CHAT, "presence_penalty": "much"}, "presence_penalty", "invalid_request"),
    ("chat", {**CHAT, "repetition_penalty": 0}, "repetition_penalty", "invalid_request"),
    ("chat", {**CHAT, "logit_bias": {"5": 101}}, "logit_bias.5", "invalid_request"),
    ("chat", {**CHAT, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_request"),
    ("chat", {**CHAT, "best_of": 2}, "best_of", "unsupported_parameter"),
    ("chat", {**CHAT, "n": 2, "best_of": 3}, "best_of", "unsupported_parameter"),
    ("chat", {**CHAT, "bad_words": [""]}, "bad_words[0]", "invalid_request"),
    ("chat", {**CHAT, "bad_words": ["a"] * 129}, "bad_words", "invalid_request"),
    ("chat", {**CHAT, "allowed_token_ids": [-1]}, "allowed_token_ids[0]", "invalid_request"),
    ("chat", {**CHAT, "allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids", "invalid_request"),
    ("chat", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ("chat", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_request"),
    ("chat", {"messages": IMAGE}, "messages[0].content", "unsupported_parameter"),
    ("chat", {**CHAT, "max_tokens": 250}, "max_tokens", "context_length_exceeded"),
    ("chat", {**CHAT, "max_tokens": 3, "min_tokens": 4}, "min_tokens", "invalid_request"),
    ("chat", {**CHAT, "moesaic": {"quality": "best"}}, "moesaic.quality", "invalid_request"),
    ("completions", {"prompt": ""}, "prompt", "invalid_request"),
    ("completions", {"prompt": []}, "prompt", "invalid_request"),
    ("completions", {"prompt": [1, "a"]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [[1], []]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [-1]}, "prompt", "invalid_request"),
    ("completions", {"prompt": [1 << 40]}, "prompt", "invalid_request"),
    ("completions", {"prompt": ["a"] * 1025}, "prompt", "invalid_request"),
    ("completions", {"prompt": [5] * 300}, "prompt", "context_length_exceeded"),
    ("completions", {"prompt": [[5], [5] * 300]}, "prompt[1]", "context_length_exceeded"),
    ("completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_request"),
    ("completions", {"prompt": "a", "model": "other"}, "model", "model_not_found"),
    ("classify", {"input": "a", "labels": []}, "labels", "invalid_request"),
    ("classify", {"input": "a", "labels": ["a"]}, "labels", "invalid_request"),
    ("classify", {"input": "a", "labels": ["a", " a"]}, "labels[1]", "invalid_request"),
    ("classify", {"input": "a", "labels": ["a", ""]}, "labels[1]", "invalid_request"),
    ("classify", {"input": "a", "labels": ["a", 5]}, "labels[1]", "invalid_request"),
    ("classify", {"input": [], "labels": ["a", "b"]}, "input", "invalid_request"),
    ("classify", {"input": "hello " * 300, "labels": ["yes", "no"]}, "input", "context_length_exceeded"),
    ("classify", {"input": "a", "labels": ["hello world", "no"], "method": "token"}, "method", "invalid_request"),
    ("classify", {"input": "a", "labels": MANY, "method": "choice"}, "method", "invalid_request"),
]  # fmt: skip


async def test_a_bad_field_is_named_and_nothing_is_sent(open_house, scripts, subtests) -> None:
    async with open_house(scripts.says("yes")) as house:
        for path, body, field, code in BAD_FIELDS:
            with subtests.test(path=path, field=field):
                response = await house.client.post(PATHS[path], json=body)

                error = error_of(response)
                assert response.status_code == (404 if code == "model_not_found" else 400)
                assert (error["param"], error["code"]) == (field, code), error
                assert not house.workers[0].submits
                assert house.gateway.num_inflight == 0


async def test_context_overflow_names_the_numbers(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post(
            "/v1/completions", json={"prompt": [5] * 250, "max_tokens": 10}
        )

    assert all(number in error_of(response)["message"] for number in ("256", "250", "10"))


async def test_classifying_without_labels_names_them(open_house, scripts) -> None:
    async with open_house(scripts.scores(-1.0)) as house:
        response = await house.client.post("/classify", json={"input": "a"})

    assert response.status_code == 404
    assert error_of(response)["code"] == "route_not_enabled"
    assert "labels" in error_of(response)["message"]


async def test_a_thousand_bad_fields_give_a_short_error(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"messages": [{"role": "x" * 900, "content": 5}] * 4000}
        response = await house.client.post("/v1/chat/completions", json=body)

    assert response.status_code == 400
    assert len(response.content) < 16 * 1024


NO_OBJECTS = [b"{", b"[]", b"null", b'"a"', b"[" * 100_000, b"\xff\xfe", b'{"messages": NaN}', b""]


async def test_bodies_that_are_no_json_object_are_bad_requests(
    open_house, scripts, subtests
) -> None:
    async with open_house(scripts.says("yes")) as house:
        for content in NO_OBJECTS:
            with subtests.test(content=content[:20]):
                headers = {"content-type": "application/json"}
                response = await house.client.post(
                    "/v1/chat/completions", content=content, headers=headers
                )

                assert response.status_code == 400
                assert error_of(response)["code"] == "invalid_request"


async def test_broken_json_is_told_where_it_breaks(open_house, scripts) -> None:
    headers = {"content-type": "application/json"}
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post(
            "/v1/completions", content=b'{"prompt":\n "a",}', headers=headers
        )

    error = error_of(response)
    assert response.status_code == 400
    assert (error["param"], error["code"]) == (None, "invalid_request")
    assert error["message"].startswith("the body is not valid JSON: ")
    assert re.search(r" at line 2 column \d+$", error["message"])


async def test_a_form_post_is_told_the_content_type(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post("/v1/chat/completions", data={"a": "b"})

    assert "application/json" in error_of(response)["message"]


async def test_a_body_over_the_limit_is_refused_whether_announced_or_not(
    open_house, scripts
) -> None:
    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 1000

    async with open_house(scripts.says("yes"), max_body_bytes=2048) as house:
        announced = await house.client.post("/v1/completions", content=b" " * 3000)
        streamed = await house.client.post("/v1/completions", content=chunked())

    for response in (announced, streamed):
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"


async def test_a_key_is_needed_everywhere_but_for_probes(open_house, scripts) -> None:
    async with open_house(scripts.says("yes"), api_key="k1") as house:
        for path in ("/livez", "/readyz", "/health"):
            assert (await house.client.get(path)).status_code == 200
        for path in ("/v1/models", "/version", "/nowhere", "/openapi.json", "/docs", "/metrics"):
            response = await house.client.get(path)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            wrong = await house.client.get(path, headers={"authorization": "Bearer k2"})
            assert wrong.status_code == 401
        right = await house.client.get("/v1/models", headers={"authorization": "Bearer k1"})
        assert right.status_code == 200


async def test_without_workers_requests_are_told_to_retry(open_house) -> None:
    async with open_house() as house:
        ready = await house.client.get("/readyz")
        response = await house.client.post("/v1/chat/completions", json=CHAT)

    assert ready.status_code == 503
    assert "attention_workers" in ready.json()["failing"]
    assert response.status_code == 503
    assert error_of(response)["code"] == "no_attention_worker"
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-should-retry"] == "true"


async def test_services_of_another_protocol_are_named_while_others_serve(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("yes")) as house:
        before = await house.client.get("/readyz")
        house.gateway.other_protocol = {"expert-1": "not used: expert-1 speaks protocol 2"}
        after = await house.client.get("/readyz")

    assert (before.status_code, before.json()) == (200, {"status": "ok", "failing": {}})
    assert (after.status_code, after.json()["status"]) == (200, "ok")
    assert after.json()["other_protocol"] == {"expert-1": "not used: expert-1 speaks protocol 2"}


async def test_too_many_requests_are_refused_at_the_door(open_house, scripts) -> None:
    async with open_house(scripts.silent, max_inflight=1) as house:
        first = asyncio.ensure_future(house.client.post("/v1/chat/completions", json=CHAT))
        await house.until(lambda: house.gateway.num_inflight == 1)
        second = await house.client.post("/v1/chat/completions", json=CHAT)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await house.until(lambda: house.gateway.num_inflight == 0)

    assert second.status_code == 503
    assert error_of(second)["code"] == "overloaded"


async def test_a_worker_s_refusal_keeps_its_fields(open_house, scripts) -> None:
    refusal = scripts.fails(
        code="invalid_request", message="prompt: too odd", field="prompt", http_status=400
    )
    async with open_house(refusal) as house:
        for stream in (
            False,
            True,
        ):  # it comes before the first chunk, so even a stream has a status
            response = await house.client.post(
                "/v1/completions", json={"prompt": "a", "stream": stream}
            )
            assert response.status_code == 400
            assert error_of(response)["param"] == "prompt"


async def test_server_errors_give_no_addresses_or_paths_away(open_house, scripts) -> None:
    message = "lost 10.1.2.3:7000 while reading /var/lib/models/x.safetensors on node-1:7001"
    async with open_house(
        scripts.fails(code="internal_error", message=message, http_status=500)
    ) as house:
        response = await house.client.post("/v1/completions", json={"prompt": "a"})

    text = error_of(response)["message"]
    assert not any(secret in text for secret in ("10.1.2.3", "/var", "node-1"))
    assert response.headers["x-should-retry"] == "false"


async def test_an_unknown_exception_is_found_in_the_log_by_its_id(
    open_house, scripts, monkeypatch
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("canary")

    async with open_house(scripts.says("yes")) as house:
        monkeypatch.setattr(house.gateway, "admit", breaks)
        response = await house.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "r1"}
        )
        [logged] = [line for line in house.logs if line["event"] == "request.failed"]

    assert response.status_code == 500
    assert error_of(response)["message"] == internal_error("r1").body.message
    assert "r1" in error_of(response)["message"]
    assert "canary" not in response.text
    assert logged["request_id"] == "r1"


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    st.dictionaries(
        st.sampled_from(["messages", "n", "stop", "seed", "temperature", "stream", "moesaic", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
    )
)  # fmt: skip
def test_any_body_is_accepted_or_refused_by_name(body: dict[str, Any]) -> None:
    from pydantic import ValidationError

    from moesaic.services.gateway.fields.generating import ChatWire
    from moesaic.services.gateway.http.problems import invalid_fields

    try:
        ChatWire.model_validate(json.loads(json.dumps(body)))
    except ValidationError as error:
        problem = problem_of(invalid_fields(error.errors()))
        assert problem.status == 400
        assert problem.body.param
        assert len(problem.body.message) <= 1100


async def test_probes_and_scrapes_are_no_news(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        for path in ("/livez", "/readyz", "/health", "/metrics", "/v1/models"):
            assert (await house.client.get(path)).status_code == 200
        finished = [e for e in house.logs if e["event"] == "request.finished"]

    levels = {entry["route"]: entry["log_level"] for entry in finished}
    assert levels.pop("/v1/models") == "info"
    assert levels == dict.fromkeys(("/livez", "/readyz", "/health", "/metrics"), "debug")
