"""Questions that share a prefix: on one worker, one behind the other, answered together or not at all."""

import asyncio
import json
import math

import pytest

from moesaic.api_keys import digest_of
from moesaic.services.gateway.score import reading
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.conftest import Emit

LABELS = ["travel", "music", {"label": "house", "description": "a home"}]
MULTI = {"input": "a story", "labels": LABELS, "method": "multi"}
MANY = {
    "input": "a story",
    "questions": [{"type": "predicate", "instructions": f"It has {i} words."} for i in range(100)],
}


async def test_multi_asks_about_each_label_behind_the_same_text(
    open_house, scripts, language
) -> None:
    async def script(submit: pb.Submit, emit) -> None:
        text = language.tokenizer.decode(list(submit.token_ids))
        yes = 0.4 if '"music"' in text else 0.1
        await scripts.scores(math.log(yes), math.log(0.5 - yes))(submit, emit)

    async with open_house(script) as house:
        answer = (await house.client.post("/v1/classify", json=MULTI)).json()
        submits = house.workers[0].submits

    assert answer["method"] == "multi"
    [item] = answer["data"]
    assert (item["label"], item["num_classes"]) == ("music", 3)
    assert item["probs"] == pytest.approx([0.2, 0.8, 0.2])  # they need not add up to 1
    assert [entry["label"] for entry in item["labels"]] == ["music", "travel", "house"]
    assert item["labels"][0]["logprob"] == pytest.approx(math.log(0.4))
    assert item["label_mass"] == pytest.approx(0.5)
    assert all(entry["label_mass"] == pytest.approx(0.5) for entry in item["labels"])
    prompts = [language.tokenizer.decode(list(submit.token_ids)) for submit in submits]
    heads = {prompt.partition("Does the label")[0] for prompt in prompts}
    assert len(heads) == 1
    assert "a story\n\n" in heads.pop()
    assert '"house (a home)"' in prompts[2]
    assert {str(submit.scoring) for submit in submits} == {str(submits[0].scoring)}


async def test_multi_takes_a_single_label(open_house, scripts) -> None:
    async with open_house(scripts.scores(-1.0, -1.0)) as house:
        body = {**MULTI, "labels": ["music"]}
        answer = (await house.client.post("/v1/classify", json=body)).json()

    assert answer["data"][0]["probs"] == [0.5]


async def test_siblings_go_to_one_worker_in_order(open_house, scripts) -> None:
    scores = scripts.scores(-1.0, -2.0)
    async with open_house(scores, scores, scores) as house:
        response = await house.client.post("/v1/decisions", json=MANY)
        by_worker = [worker.submits for worker in house.workers]

    assert response.status_code == 200
    assert sorted(map(len, by_worker)) == [0, 0, 100]
    [submits] = filter(None, by_worker)
    numbers = [int(submit.request_id.rpartition("-")[2]) for submit in submits]
    assert numbers == list(range(100))


async def test_texts_that_share_nothing_spread_over_the_workers(open_house, scripts) -> None:
    scores, came = scripts.scores(-1.0, -2.0), asyncio.Condition()
    num_came = 0

    async def together(submit: pb.Submit, emit: Emit) -> None:
        """Answer once all of the same call are there: a worker that has answered has no load."""
        nonlocal num_came
        async with came:
            num_came += 1
            came.notify_all()
            all_of_them = 2 if num_came <= 2 else 8
            await came.wait_for(lambda: num_came >= all_of_them)
        await scores(submit, emit)

    async with open_house(together, together) as house:
        body = {"input": ["a story", "music"], "labels": ["yes", "no"]}
        await house.client.post("/v1/classify", json=body)
        shares = [len(worker.submits) for worker in house.workers]

        families = {**MULTI, "input": ["a story", "music"]}
        await house.client.post("/v1/classify", json=families)
        by_worker = [worker.submits[1:] for worker in house.workers]

    assert shares == [1, 1]
    assert sorted(map(len, by_worker)) == [3, 3]


async def test_siblings_of_a_lost_worker_move_together(open_house, scripts) -> None:
    scores = scripts.scores(-1.0, -2.0)
    async with open_house(scripts.silent) as house:
        [first] = house.workers
        asking = asyncio.ensure_future(house.client.post("/v1/decisions", json=MANY))
        await house.until(lambda: bool(first.submits))
        await house.add(scores)
        await house.add(scores)
        await first.kill()
        answer = await asking
        shares = [len(worker.submits) for worker in house.workers[1:]]

    assert answer.status_code == 200
    assert sorted(shares) == [0, 100]


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/classify", "/v1/rerank"])
async def test_one_sibling_that_fails_fails_the_request_and_ends_the_others(
    open_house, scripts, path: str
) -> None:
    answered = scripts.scores(-1.0, -2.0)
    failed = scripts.fails(code="poison_request", message="no", http_status=500)

    async def script(submit: pb.Submit, emit) -> None:
        number = int(submit.request_id.rpartition("-")[2])
        await [answered, failed, scripts.silent][min(number, 2)](submit, emit)

    body = {
        "/v1/decisions": MANY,
        "/v1/classify": MULTI,
        "/v1/rerank": {"query": "a", "documents": ["b", "c", "d"]},
    }[path]
    async with open_house(script) as house:
        response = await house.client.post(path, json=body)
        cancelled = await house.workers[0].cancels.get()
        await house.gateway.idle.wait()

    assert response.status_code == 500
    assert list(response.json()) == ["error"]
    assert response.json()["error"]["code"] == "poison_request"
    assert cancelled.request_id.endswith("-2")


async def test_siblings_are_refused_together_before_any_is_sent(open_house, scripts) -> None:
    questions = [*MANY["questions"], {"type": "predicate", "instructions": "hello " * 300}]
    async with open_house(scripts.scores(-1.0, -2.0)) as house:
        response = await house.client.post(
            "/v1/decisions", json={"input": "a", "questions": questions}
        )
        submits = house.workers[0].submits

    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "questions[100]" in error["message"]
    assert not submits


async def test_a_small_body_may_not_ask_for_more_than_a_gateway_can_hold(
    open_house, scripts, monkeypatch
) -> None:
    monkeypatch.setattr(reading, "MAX_TOKENS", 1000)
    async with open_house(scripts.scores(-1.0, -2.0)) as house:
        response = await house.client.post("/v1/decisions", json=MANY)
        submits = house.workers[0].submits

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert "1000" in error["message"]
    assert "questions[" in error["message"]
    assert not submits


async def test_a_worker_without_room_for_a_sibling_is_asked_again_since_it_had_the_others(
    open_house, scripts
) -> None:
    answered = scripts.scores(-1.0, -2.0)
    full = scripts.fails(code="overloaded", message="full", http_status=503, retryable=True)

    async def script(submit: pb.Submit, emit) -> None:
        last = submit.request_id.endswith("-99") and submit.attempt == 1
        await (full if last else answered)(submit, emit)

    async with open_house(script) as house:
        response = await house.client.post("/v1/decisions", json=MANY)

    assert response.status_code == 200, response.text


async def test_a_tenant_pays_for_all_siblings_before_any_is_sent(
    open_house, scripts, tmp_path
) -> None:
    entry = {"name": "a", "keys": [digest_of("k")], "scopes": ["infer"], "tokens_per_minute": 1000}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"tenants": [entry]}))
    headers = {"authorization": "Bearer k"}
    async with open_house(scripts.scores(-1.0, -2.0), api_keys_file=str(keys)) as house:
        few = {**MANY, "questions": MANY["questions"][:3]}
        allowed = await house.client.post("/v1/decisions", json=few, headers=headers)
        refused = await house.client.post("/v1/decisions", json=MANY, headers=headers)
        submits = house.workers[0].submits

    assert (allowed.status_code, refused.status_code) == (200, 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert len(submits) == 3
