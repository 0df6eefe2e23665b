"""Answers get the room that the workers have, and the model's card says how much that is."""

from typing import Any

import pytest

from moesaic.messages.registry import WorkerRecord

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


async def tell(house: Any, number: int, room: int) -> None:
    """Let a worker say how many tokens a request may have."""
    old = house.fleet.workers[f"attention-{number}"]
    fields = {name: getattr(old, name) for name in WorkerRecord.__struct_fields__}
    house.fleet.put(WorkerRecord(**{**fields, "max_request_tokens": room}))
    workers = house.gateway.workers
    await house.until(lambda: room in [w.record.max_request_tokens for w in workers.accepting])


async def test_a_chat_without_max_tokens_gets_what_the_smallest_worker_has(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("yes"), scripts.says("yes")) as house:
        unknown = (await house.client.get("/v1/models")).json()["data"][0]["max_model_len"]
        await tell(house, 1, 100)
        await tell(house, 2, 64)
        response = await house.client.post("/v1/chat/completions", json=CHAT)
        card = (await house.client.get("/v1/models")).json()["data"][0]
        tokenized = (await house.client.post("/tokenize", json={"prompt": "a"})).json()
        [submit] = [submit for worker in house.workers for submit in worker.submits]

    assert response.status_code == 200
    assert submit.generation.max_tokens == 64 - len(submit.token_ids)
    assert card["max_model_len"] == tokenized["max_model_len"] == 64
    assert unknown == 256  # the model's own


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_than_fits_is_refused_with_the_most_that_does(
    open_house, scripts, field
) -> None:
    async with open_house(scripts.says("yes")) as house:
        await tell(house, 1, 64)
        body = {"prompt": [5] * 10}
        fits = await house.client.post("/v1/completions", json={**body, field: 54})
        over = await house.client.post("/v1/completions", json={**body, field: 55})
        long = await house.client.post("/v1/completions", json={"prompt": [5] * 64})

    assert fits.status_code == 200
    assert (over.status_code, long.status_code) == (400, 400)
    error = over.json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert "at most 54" in error["message"]
    # LiteLLM and others look for these words of OpenAI's.
    for refused in (over, long):
        assert (
            "this model's maximum context length is 64 tokens" in refused.json()["error"]["message"]
        )
    assert long.json()["error"]["param"] == "prompt"


async def test_a_worker_with_more_room_than_the_model_changes_nothing(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        await tell(house, 1, 100_000)
        card = (await house.client.get("/v1/models")).json()["data"][0]

    assert card["max_model_len"] == 256
