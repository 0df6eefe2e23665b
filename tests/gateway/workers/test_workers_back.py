"""The only attention worker goes, and it or a successor comes back: requests go on from the tokens there are."""

import asyncio
from typing import Any

import pytest

from moesaic.services.gateway.workers.execution import MAX_ATTEMPTS
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.workers.test_workers_lost import BODY, TEXT, text_of

FULL = {"router_saturation_flops": 1, "limits": {"MAX_WAIT_S": 60}}  # one request fills a worker


def says_some(scripts: Any, said: int, told: asyncio.Event) -> Any:
    """A script that says so many tokens at its first attempt and stops there; later ones go on to the end."""

    async def script(submit: pb.Submit, emit: Any) -> None:
        if submit.attempt > 1:
            await scripts.says(TEXT)(submit, emit)
            return
        for index, token_id in enumerate(scripts.ids(TEXT)[:said]):
            emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id]))
        told.set()

    return script


async def lose(house: Any) -> int:
    """Kill the only worker; returns its port."""
    [worker] = house.workers
    await house.heard(worker)
    await worker.kill()
    await house.until(lambda: not house.gateway.workers.accepting)
    return int(worker.address.rsplit(":", 1)[1])


@pytest.mark.parametrize("comes", ["again", "anew"])
@pytest.mark.parametrize("said", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_goes_on_with_whoever_comes_back(
    open_house, scripts, stream: bool, said: int, comes: str
) -> None:
    told = asyncio.Event()
    async with open_house(says_some(scripts, said, told)) as house:
        [first] = house.workers
        asking = asyncio.ensure_future(
            house.client.post("/v1/completions", json={**BODY, "stream": stream, "seed": 7})
        )
        await told.wait()
        port = await lose(house)
        if comes == "again":
            await first.start(port)
        else:
            house.fleet.drop("attention-1")
            house.workers.clear()
            await house.add(scripts.says(TEXT), generation=2)
        response = await asking
        before, after = first.submits[0], [*first.submits, *house.workers[-1].submits][-1]

    text = text_of(response.text) if stream else response.json()["choices"][0]["text"]
    assert text == TEXT
    assert list(after.token_ids) == [*before.token_ids, *scripts.ids(TEXT)[:said]]
    assert (after.attempt, after.generation.num_resumed_tokens) == (2, said)
    assert after.generation.sampling == before.generation.sampling


async def test_a_classification_is_run_again_by_whoever_comes_back(open_house, scripts) -> None:
    async def script(submit: pb.Submit, emit: Any) -> None:
        if submit.attempt > 1:
            await scripts.scores(-2.0, -1.0)(submit, emit)

    async with open_house(script) as house:
        [worker] = house.workers
        body = {"input": "a story", "labels": ["yes", "no"]}
        asking = asyncio.ensure_future(house.client.post("/v1/classify", json=body))
        await house.until(lambda: bool(worker.submits))
        await worker.start(await lose(house))
        answer = (await asking).json()

    assert answer["data"][0]["label"] == "no"


async def test_requests_that_wait_for_a_filled_worker_wait_for_it_to_come_back(
    open_house, scripts
) -> None:
    told = asyncio.Event()
    async with open_house(says_some(scripts, 1, told), **FULL) as house:
        [worker] = house.workers
        asking = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY)) for _ in range(5)
        ]
        await house.until(lambda: house.gateway.num_inflight == 5)
        await told.wait()
        assert len(worker.submits) == 1
        port = await lose(house)
        worker.script = scripts.says(TEXT)
        await worker.start(port)
        texts = [
            response.json()["choices"][0]["text"] for response in await asyncio.gather(*asking)
        ]

    assert texts == [TEXT] * 5


async def test_new_requests_are_refused_while_nobody_is_there(open_house, scripts) -> None:
    async with open_house(scripts.says(TEXT)) as house:
        await lose(house)
        response = await house.client.post("/v1/completions", json=BODY)

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_attention_worker"
    assert response.headers["retry-after"]


async def test_requests_that_wait_in_vain_say_so(open_house, scripts) -> None:
    async with open_house(scripts.silent, **FULL, recovery_s=0.1) as house:
        asking = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY)) for _ in range(2)
        ]
        await house.until(lambda: house.gateway.num_inflight == 2)
        await lose(house)
        answers = await asyncio.gather(*asking)
        queued = house.gateway.workers.routing.router.num_queued

    assert [answer.status_code for answer in answers] == [503, 503]
    codes = sorted(answer.json()["error"]["code"] for answer in answers)
    assert codes == ["no_attention_worker", "worker_lost"]
    assert queued == 0


async def test_a_request_that_waits_for_somebody_to_come_back_keeps_its_deadline(
    open_house, scripts
) -> None:
    async with open_house(scripts.silent) as house:
        [worker] = house.workers
        headers = {"x-request-timeout-ms": "2000"}
        asking = asyncio.ensure_future(
            house.client.post("/v1/completions", json=BODY, headers=headers)
        )
        await house.until(lambda: bool(worker.submits))
        await lose(house)
        response = await asking
        queued = house.gateway.workers.routing.router.num_queued

    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert queued == 0


async def test_a_refusal_of_the_only_worker_is_the_answer(open_house, scripts) -> None:
    full = scripts.fails(code="overloaded", message="full", retryable=True, http_status=429)
    async with open_house(full) as house:
        response = await house.client.post("/v1/completions", json=BODY)
        asked = len(house.workers[0].submits)

    assert (response.status_code, asked) == (429, 1)


async def test_a_request_that_brings_down_its_worker_again_and_again_is_given_up(
    open_house, scripts
) -> None:
    ids = scripts.ids(TEXT)

    async def script(submit: pb.Submit, emit: Any) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=ids[:1]))
        fallen.set()

    fallen = asyncio.Event()
    async with open_house(script) as house:
        [worker] = house.workers
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=BODY))
        for _ in range(MAX_ATTEMPTS):
            await fallen.wait()
            fallen.clear()
            await worker.start(await lose(house))
        response = await asking

    assert response.json()["error"]["code"] == "worker_lost"
    assert len(worker.submits) == MAX_ATTEMPTS
