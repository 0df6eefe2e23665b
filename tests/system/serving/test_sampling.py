"""The sampling fields of a request act through all processes."""

import json
from typing import Any

from tests.waiting import HANG_S

PROMPT = "The king said to his"


def post(suite: Any, path: str, **body: Any) -> dict[str, Any]:
    with suite.client() as client:
        response = client.post(path, json=body, timeout=HANG_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_prompt_is_scored_as_an_evaluation_harness_asks(local: Any) -> None:
    with local.client() as client:
        ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    asked = {"echo": True, "logprobs": 1, "temperature": 0, "seed": 1}

    answer = post(local, "/v1/completions", prompt=[ids, ids[:1]], max_tokens=1, **asked)
    alone = post(local, "/v1/completions", prompt=[ids], max_tokens=0, **asked)

    whole, shortest = (choice["logprobs"] for choice in answer["choices"])
    assert whole["token_logprobs"][0] is None
    assert len(whole["tokens"]) == len(ids) + 1
    assert len(shortest["tokens"]) == 2
    for told, top in zip(whole["token_logprobs"][1:], whole["top_logprobs"][1:], strict=True):
        assert told <= max(top.values()) <= 0
    [prompt_only] = alone["choices"]
    assert prompt_only["logprobs"]["token_logprobs"] == whole["token_logprobs"][:-1]
    assert prompt_only["text"] == PROMPT


def test_penalties_keep_an_answer_from_repeating_itself(local: Any) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    asked["return_token_ids"] = True

    plain = post(local, "/v1/completions", **asked)["choices"][0]["token_ids"]
    penalised = post(local, "/v1/completions", **asked, presence_penalty=2, frequency_penalty=2)
    banned = post(local, "/v1/completions", **asked, logit_bias={str(plain[0]): -100})

    assert len(set(penalised["choices"][0]["token_ids"])) > len(set(plain))
    assert plain[0] not in banned["choices"][0]["token_ids"]


def test_an_answer_has_allowed_tokens_only_and_no_bad_words(local: Any) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    asked["return_token_ids"] = True

    plain = post(local, "/v1/completions", **asked)["choices"][0]
    word = plain["text"].split()[1]
    without = post(local, "/v1/completions", **asked, bad_words=[word])["choices"][0]
    some = sorted(set(without["token_ids"]))[:5]
    allowed = post(local, "/v1/completions", **asked, allowed_token_ids=some)["choices"][0]

    assert word not in without["text"].split()
    assert set(allowed["token_ids"]) <= set(some)


def test_equal_prompts_are_drawn_independently_without_a_seed(local: Any) -> None:
    # Two such answers of 16 tokens are practically never equal by chance.
    asked = {"prompt": [PROMPT] * 16, "max_tokens": 16, "temperature": 1.5, "ignore_eos": True}

    drawn = post(local, "/v1/completions", **asked)["choices"]
    seeded = post(local, "/v1/completions", **asked, seed=5)["choices"]
    again = post(local, "/v1/completions", **{**asked, "prompt": PROMPT}, n=2, seed=5)["choices"]

    assert len({choice["text"] for choice in drawn}) == 16
    assert {choice["text"] for choice in seeded} == {again[0]["text"]}
    assert again[0]["text"] != again[1]["text"]


def test_a_top_p_of_0_is_greedy(local: Any) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}

    [nothing] = post(local, "/v1/completions", **asked, top_p=0, temperature=2)["choices"]
    [greedy] = post(local, "/v1/completions", **asked, temperature=0)["choices"]

    assert nothing["text"] == greedy["text"]


def test_only_allowed_tools_are_called(local: Any) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "later", "never")]
    allowed = {"mode": "required", "tools": tools[1:2]}

    answer = post(
        local,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is the time?"}],
        tools=tools,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        n=4,
        max_tokens=60,
    )

    calls = [call for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert {call["function"]["name"] for call in calls} == {"later"}


def test_an_answer_has_the_structure_asked_for(local: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}

    answer = post(
        local,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "How old is he?"}],
        response_format=form,
        n=4,
        max_tokens=50,
    )
    [chosen] = post(local, "/v1/completions", prompt=PROMPT, guided_choice=["a b", "c"])["choices"]

    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert 0 <= json.loads(choice["message"]["content"])["age"] <= 120
    assert chosen["text"] in ("a b", "c")


def test_a_schema_that_is_none_is_the_caller_s_mistake(local: Any) -> None:
    with local.client() as client:
        body = {"prompt": PROMPT, "guided_json": {"type": "nothing"}}
        response = client.post("/v1/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_json"
