"""What a request asks for beside its work, and what it is told of the prefix cache."""

import pytest
from prometheus_client import REGISTRY

from moesaic.v1 import attention_pb2 as pb

CLASSIFY = {"input": "hello", "labels": ["yes", "no"]}
COMPLETION = {"prompt": "hello", "max_tokens": 2}


DECISION = {"input": "hello", "questions": [{"type": "predicate", "instructions": "Is it so?"}]}


@pytest.mark.parametrize(
    ("route", "body"),
    [("classify", CLASSIFY), ("decisions", DECISION), ("completions", COMPLETION)],
)
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, (0, "", 0.0)),
        ({"priority": -3, "cache_salt": "ours"}, (-3, "ours", 0.0)),
        ({"moesaic": {"priority": 4, "quality": "exact"}}, (4, "", 1.0)),
        ({"priority": 0, "moesaic": {"priority": 4}}, (0, "", 0.0)),
        ({"moesaic": {"min_threshold": 0.25}}, (0, "", 0.25)),
    ],
)
async def test_priority_salt_and_quality_reach_the_worker(
    open_house, route: str, body: dict[str, object], asked: dict[str, object], told: object
) -> None:
    async def script(submit: pb.Submit, emit) -> None:
        if submit.WhichOneof("work") == "scoring":
            emit(scores=pb.Scores(logprobs=[-1.0] * len(submit.scoring.candidates)))
        emit(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))

    async with open_house(script) as house:
        response = await house.client.post(f"/v1/{route}", json={**body, **asked})
        [submit] = house.workers[0].submits

    assert response.status_code == 200, response.text
    assert (submit.priority, submit.cache_salt, submit.min_threshold) == told


@pytest.mark.parametrize("store_kv", [True, False, None])
async def test_whether_to_store_kv_reaches_the_worker_for_what_is_scored_only(
    open_house, scripts, store_kv: bool | None
) -> None:
    async with open_house(scripts.scores(-1.0, -2.0)) as house:
        body = {**CLASSIFY, "moesaic": {"store_kv": store_kv}}
        response = await house.client.post("/v1/classify", json=body)
        [submit] = house.workers[0].submits

    assert response.status_code == 200, response.text
    assert (submit.scoring.store_kv if submit.scoring.HasField("store_kv") else None) is store_kv


async def test_an_empty_salt_is_refused(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {**COMPLETION, "cache_salt": ""}
        response = await house.client.post("/v1/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


async def test_a_prompt_with_several_answers_counts_its_cached_tokens_once(open_house) -> None:
    async def script(submit: pb.Submit, emit) -> None:
        first = submit.request_id.endswith(("-0", "-2"))  # the siblings find what it computed
        cached = (0 if submit.token_ids[0] == 5 else 1) if first else 2
        emit(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, cached_tokens=cached))

    by = {"route": "/v1/completions", "model": "tiny"}

    def counted() -> float:
        return REGISTRY.get_sample_value("moesaic_prompt_tokens_cached_total", by) or 0

    before = counted()
    async with open_house(script) as house:
        body = {"prompt": [[5, 6, 7], [6, 7, 8]], "max_tokens": 2, "n": 2}
        response = await house.client.post("/v1/completions", json=body)
        await house.gateway.idle.wait()

    assert counted() == before + 1
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
