"""JSON that is nested too deeply is refused by its field with one line of log, wherever it stands; a little less is
read by all that read it: templates, grammars, calls."""

import json
from typing import Any

import pytest

from moesaic.json_texts import MAX_DEPTH

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
AROUND = 12  # levels of the fields themselves, at most


def deep(levels: int) -> dict[str, Any]:
    """A JSON schema of so many levels."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def asks(levels: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Bodies with something deep in them, each with its route and the field."""
    schema = deep(levels)
    function = {"name": "now", "parameters": schema}
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "now", "arguments": json.dumps(schema)},
    }
    turns = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"documents": [schema]},
        "guided_json": schema,
        "json_schema": schema,
        "structured_outputs": {"json": schema},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "logit_bias": {"5": schema},
        "messages": [{"role": "user", "content": "a", "extra": schema}],
        "stop": schema,
        "metadata": schema,
    }
    chats = [(name, {**CHAT, name: value}) for name, value in fields.items()]
    chats += [
        ("guided_json", {**CHAT, "guided_json": json.dumps(schema)}),
        ("json_schema", {**CHAT, "json_schema": json.dumps(schema)}),
        ("structured_outputs.json", {**CHAT, "structured_outputs": {"json": json.dumps(schema)}}),
    ]
    others: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", "prompt", {"prompt": schema}),
        ("/v1/completions", "guided_json", {"prompt": "a", "guided_json": schema}),
        ("/v1/classify", "labels", {"input": "a", "labels": [schema, "b"]}),
        ("/v1/decisions", "prompt_cache_options", {"input": "a", "questions": [], "prompt_cache_options": schema}),
        ("/v1/score", "items", {"queries": "a", "items": [schema]}),
        ("/v1/rerank", "documents", {"query": "a", "documents": [{"text": "b", "x": schema}]}),
        ("/generative_scoring", "items", {"query": "a", "items": [schema], "label_token_ids": [1]}),
        ("/tokenize", "chat_template_kwargs", {**CHAT, "chat_template_kwargs": {"documents": schema}}),
        ("/tokenize", "tools", {**CHAT, "tools": [{"type": "function", "function": function}]}),
        ("/detokenize", "tokens", {"tokens": [schema]}),
        ("/v1/batches", "metadata", {"metadata": schema}),
    ]  # fmt: skip
    arguments = "messages[1].tool_calls[0].function.arguments"
    calls = ("/v1/chat/completions", arguments, {"messages": turns})
    return [*(("/v1/chat/completions", *chat) for chat in chats), *others, calls]


@pytest.mark.parametrize("levels", [500, 970, 20_000])
async def test_what_is_too_deep_is_refused_by_its_field(
    open_house, scripts, subtests, levels
) -> None:
    async with open_house(scripts.says("yes")) as house:
        for path, field, body in asks(0):
            with subtests.test(path=path, field=field):
                house.logs.clear()
                text = json.dumps(body).replace(
                    '{"type": "string"}', '{"a":' * levels + "1" + "}" * levels
                )
                text = text.replace(
                    '{\\"type\\": \\"string\\"}', '{\\"a\\":' * levels + "1" + "}" * levels
                )
                answer = await house.client.post(
                    path, content=text, headers={"content-type": "application/json"}
                )

                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, field), error
                assert f"more than {MAX_DEPTH} deep" in error["message"]
                assert [line["event"] for line in house.logs] == ["request.finished"]


async def test_what_is_as_deep_as_may_be_is_no_failure(open_house, scripts, subtests) -> None:
    async with open_house(scripts.anything) as house:
        for path, field, body in asks(MAX_DEPTH - AROUND):
            with subtests.test(path=path, field=field):
                house.logs.clear()
                answer = await house.client.post(path, json=body)

                assert answer.status_code < 500, answer.text
                assert not [line for line in house.logs if line["log_level"] == "error"]
