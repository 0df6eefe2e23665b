import json
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
LONE = "a\ud800"
NOT_UNICODE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONE}]}, "messages[0].content"),
    ("/v1/chat/completions", {**CHAT, "stop": ["b", LONE]}, "stop[1]"),
    ("/v1/chat/completions", {**CHAT, "unknown": {LONE: 1}}, "unknown"),
    ("/v1/chat/completions", {**CHAT, LONE: 1}, "body"),
    ("/v1/completions", {"prompt": LONE}, "prompt"),
    ("/v1/completions", {"prompt": ["b", LONE]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "b", "stop": LONE, "stream": True}, "stop"),
    ("/v1/classify", {"input": LONE, "labels": ["b", "c"]}, "input"),
    ("/v1/classify", {"input": "b", "labels": ["b", {"label": LONE}]}, "labels[1].label"),
    ("/v1/classify", {"input": "b", "labels": ["b", "c"], "instruction": LONE}, "instruction"),
    ("/v1/decisions", {"input": "b", "questions": [{"name": LONE}]}, "questions[0].name"),
    ("/v1/rerank", {"query": LONE, "documents": ["b"]}, "query"),
    ("/tokenize", {"prompt": LONE}, "prompt"),
]  # fmt: skip


async def test_a_lone_surrogate_is_refused_by_its_field(open_house, scripts, subtests) -> None:
    headers = {"content-type": "application/json"}
    async with open_house(scripts.says("yes")) as house:
        for path, body, field in NOT_UNICODE:
            with subtests.test(path=path, field=field):
                content = json.dumps(body).encode()
                response = await house.client.post(path, content=content, headers=headers)

                error = response.json()["error"]
                assert response.status_code == 400
                assert (error["param"], error["code"]) == (field, "invalid_request")
                assert "not valid Unicode: a lone surrogate at" in error["message"]
                assert not house.workers[0].submits
