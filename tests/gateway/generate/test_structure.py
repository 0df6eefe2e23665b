import json
from typing import Any

import pytest

from moesaic.models.text.dialects.rules import BLANKS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SENT = json.dumps({"x-guidance": BLANKS, **SCHEMA})
ANY_SENT = json.dumps({"x-guidance": BLANKS, "type": "object"})


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_SENT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            SENT,
        ),
        ({"structured_outputs": {}}, None, ""),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SENT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_SENT),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SENT),
        ({"guided_json": "{"}, "json_schema", "{"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"guided_choice": ["ü"]}, "choice", '["\\u00fc"]'),
    ],
)
async def test_every_way_to_ask_for_structure_reaches_the_worker(
    open_house, scripts, body: dict[str, Any], kind: str | None, text: str
) -> None:
    async with open_house(scripts.says("yes")) as house:
        messages = [{"role": "user", "content": "a"}]
        response = await house.client.post(
            "/v1/chat/completions", json={"messages": messages, **body}
        )
        assert response.status_code == 200, response.text
        [submit] = house.workers[0].submits

    grammar = submit.generation.grammar
    assert submit.generation.HasField("grammar") == (kind is not None)
    assert grammar.WhichOneof("kind") == kind
    if kind is not None:
        assert getattr(grammar, kind) == text
        assert grammar.field.startswith(next(iter(body)))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_the_worker_refuses_is_the_caller_s_mistake(
    open_house, scripts, stream
) -> None:
    refusing = scripts.fails(
        code="invalid_request", message="guided_regex: (a", field="guided_regex", http_status=400
    )
    async with open_house(refusing) as house:
        body = {"prompt": "a", "guided_regex": "(a", "stream": stream}
        response = await house.client.post("/v1/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_regex"
