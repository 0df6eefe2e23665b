"""What is wrong with a request of several questions is named, and nothing of it is sent."""

import math

import pytest

PREDICATE = {"type": "predicate", "instructions": "Is it?"}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
LEVELS = [{"label": "low"}, {"label": "high"}]
GRADE = {"type": "score", "instructions": "a"}
ASKED = {"input": "a", "questions": [PREDICATE]}
SCORED = {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}
IMAGE = [{"type": "input_image", "image_url": "x"}]


def question(**fields: object) -> dict[str, object]:
    return {"input": "a", "questions": [PREDICATE, {**CHOICE, **fields}]}


DECISIONS = [
    ({"questions": [PREDICATE]}, "input", "invalid_request"),
    ({"input": "a", "questions": []}, "questions", "invalid_request"),
    ({"input": "a", "questions": [PREDICATE] * 401}, "questions", "invalid_request"),
    ({**ASKED, "temperature": 1}, "temperature", "invalid_request"),
    ({**ASKED, "joint": True}, "joint", "invalid_request"),
    ({**ASKED, "prompt_cache_key": "a\0b"}, "prompt_cache_key", "invalid_request"),
    ({**ASKED, "safety_identifier": "a" * 129}, "safety_identifier", "invalid_request"),
    ({**ASKED, "input": [{"role": "robot", "content": "a"}]}, "input[0].role", "invalid_request"),
    ({**ASKED, "input": []}, "input", "invalid_request"),
    ({**ASKED, "input": None}, "input", "invalid_request"),
    ({**ASKED, "input": [{"role": "user", "content": IMAGE}]}, "input[0].content", "unsupported_parameter"),
    ({**ASKED, "input": "hello " * 300}, "input", "context_length_exceeded"),
    (question(type="rank"), "questions[1]", "invalid_request"),
    (question(instructions=" "), "questions[1].instructions", "invalid_request"),
    (question(choices=[{"value": "a"}]), "questions[1].choices", "invalid_request"),
    (question(choices=[{"value": "a"}, {"value": 5}]), "questions[1].choices[1].value", "invalid_request"),
    (question(choices=[{"value": "a"}, {"value": "a"}]), "questions[1].choices[1]", "invalid_request"),
    (question(choices=[{"value": "true"}, {"value": True}]), "questions[1].choices[1]", "invalid_request"),
    (question(choices=[{"value": "a"}, {"value": ""}]), "questions[1].choices[1]", "invalid_request"),
    (question(more=1), "questions[1].more", "invalid_request"),
    ({"input": "a", "questions": [{**GRADE, "levels": LEVELS[:1]}]}, "questions[0].levels", "invalid_request"),
    ({"input": "a", "questions": [{**GRADE, "levels": LEVELS * 2}]}, "questions[0].levels[2]", "invalid_request"),
]  # fmt: skip
SCORES = [
    ({}, "queries", "invalid_request"),
    ({"queries": "a"}, "queries", "invalid_request"),
    ({"text_1": "a", "documents": "b"}, "documents", "invalid_request"),
    ({"query": "a", "items": ["b"], "label_token_ids": [5]}, "label_token_ids", "invalid_request"),
    ({"text_1": "a", "text_2": []}, "text_2", "invalid_request"),
    ({"text_1": "a", "text_2": ["b"] * 1025}, "text_2", "invalid_request"),
    ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "invalid_request"),
    ({"text_1": "a", "text_2": "hello " * 300}, "text_2", "context_length_exceeded"),
    ({"text_1": "a", "text_2": ["b", "hello " * 300]}, "text_2[1]", "context_length_exceeded"),
    ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", "unsupported_parameter"),
    ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
    ({"text_1": "a", "text_2": "b", "model": "other"}, "model", "model_not_found"),
]  # fmt: skip
RANKS = [
    ({"query": "a"}, "documents", "invalid_request"),
    ({"query": "a", "documents": []}, "documents", "invalid_request"),
    ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "invalid_request"),
    ({"query": "a", "documents": ["b", "hello " * 300]}, "documents[1]", "context_length_exceeded"),
    ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc", "unsupported_parameter"),
]  # fmt: skip
ITEMS = [
    ({**SCORED, "query": None}, "query", "invalid_request"),
    ({**SCORED, "items": []}, "items", "invalid_request"),
    ({**SCORED, "items": "b"}, "items", "invalid_request"),
    ({**SCORED, "items": [[]]}, "items", "invalid_request"),
    ({**SCORED, "items": [[1 << 40]]}, "items[0]", "invalid_request"),
    ({**SCORED, "query": [-1]}, "query", "invalid_request"),
    ({**SCORED, "query": "", "items": ["b", ""]}, "items[1]", "invalid_request"),
    ({**SCORED, "items": ["b", [5] * 300]}, "items[1]", "context_length_exceeded"),
    ({**SCORED, "label_token_ids": []}, "label_token_ids", "invalid_request"),
    ({**SCORED, "label_token_ids": [5, 4000]}, "label_token_ids[1]", "invalid_request"),
    ({**SCORED, "label_token_ids": [5, 6, 5]}, "label_token_ids[2]", "invalid_request"),
]  # fmt: skip
MULTI = [
    ({"input": "a", "labels": [], "method": "multi"}, "labels", "invalid_request"),
    ({"input": "a", "labels": ["hello " * 300, "b"], "method": "sequence"}, "labels", "context_length_exceeded"),
    ({"input": ["a"] * 1024, "labels": ["b", "c", "d", "e", "f"], "method": "multi"}, "input", "invalid_request"),
    ({"input": ["a", "hello " * 300], "labels": ["b"], "method": "multi"}, "input[1]", "context_length_exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "cases"),
    [
        ("/v1/decisions", DECISIONS),
        ("/v1/score", SCORES),
        ("/v1/rerank", RANKS),
        ("/generative_scoring", ITEMS),
        ("/v1/classify", MULTI),
    ],
)
async def test_a_bad_field_is_named_and_nothing_is_sent(
    open_house, scripts, subtests, path, cases
) -> None:
    async with open_house(scripts.scores(-1.0, -1.0)) as house:
        for body, field, code in cases:
            with subtests.test(field=field, code=code):
                response = await house.client.post(path, json=body)

                error = response.json()["error"]
                assert response.status_code == (404 if code == "model_not_found" else 400)
                assert (error["param"], error["code"]) == (field, code), error
                assert not house.workers[0].submits
                assert house.gateway.num_inflight == 0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/classify", {"input": "a", "labels": ["yes", "no"]}, "input"),
        ("/v1/decisions", ASKED, "input"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "documents"),
        ("/generative_scoring", SCORED, "items"),
    ],
)
async def test_what_a_worker_refuses_is_named_as_the_caller_called_it(
    open_house, scripts, path, body, field
) -> None:
    refused = {"code": "context_length_exceeded", "message": "prompt: no room", "field": "prompt"}
    async with open_house(scripts.fails(**refused, http_status=400)) as house:
        response = await house.client.post(path, json=body)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("logprobs", [(math.nan, -1.0), (-1.0,), ()])
async def test_scores_that_are_none_are_no_answer(open_house, scripts, logprobs) -> None:
    async with open_house(scripts.scores(*logprobs)) as house:
        for path, body in (
            ("/v1/classify", {"input": "a", "labels": ["yes", "no"]}),
            ("/v1/decisions", ASKED),
            ("/generative_scoring", SCORED),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ):
            response = await house.client.post(path, json=body)

            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
