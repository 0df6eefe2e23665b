import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from moesaic.api_keys import digest_of
from moesaic.v1 import attention_pb2 as pb

HEADERS = {"authorization": "Bearer k"}


@pytest.fixture
def keys_file(tmp_path):
    def write(**limits: int) -> str:
        entry = {"name": "acme", "keys": [digest_of("k")], "scopes": ["infer"], **limits}
        other = {"name": "other", "keys": [digest_of("o")], "scopes": ["infer"]}
        path = tmp_path / "keys.json"
        path.write_text(json.dumps({"tenants": [entry, other]}))
        return str(path)

    return write


class Clock:
    """Stands still unless it is told."""

    def __init__(self) -> None:
        self.now_ns = 10**15

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("moesaic.services.gateway.access.time", clock)
    return clock


async def ask(house: Any, headers: dict[str, str] = HEADERS, **body: Any) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 4, **body}
    answer: httpx.Response = await house.client.post("/v1/completions", json=body, headers=headers)
    return answer


def limited(response: httpx.Response, code: str) -> bool:
    error = response.json()["error"]
    assert response.status_code == 429
    assert (error["code"], error["type"]) == (code, "rate_limit_error")
    assert response.headers["x-should-retry"] == "true"
    wait_ms = int(response.headers["retry-after-ms"])
    return 0 < wait_ms <= 1000 * int(response.headers["retry-after"]) < wait_ms + 1000


async def test_requests_a_minute_are_counted_and_told(
    open_house, scripts, keys_file, clock
) -> None:
    async with open_house(
        scripts.says("yes"), api_keys_file=keys_file(requests_per_minute=3)
    ) as house:
        answers = [await ask(house) for _ in range(2)]
        bad = await ask(house, temperature=9)
        refused = await ask(house)
        other = await ask(house, {"authorization": "Bearer o"})
        clock.now_ns += int(refused.headers["retry-after-ms"]) * 10**6
        again = await ask(house)

    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["2", "1"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert [a.headers["x-ratelimit-reset-requests"] for a in answers] == ["20s", "40s"]
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    assert bad.status_code == 400  # it counts all the same
    assert "x-ratelimit-limit-requests" not in bad.headers
    assert limited(refused, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["retry-after"] == "20"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert (other.status_code, again.status_code) == (200, 200)
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_taken_for_the_most_and_corrected_by_what_was_used(
    open_house, scripts, keys_file
) -> None:
    async with open_house(
        scripts.says("yes"), api_keys_file=keys_file(tokens_per_minute=60)
    ) as house:
        prompt = len(scripts.ids("hello"))
        first = await ask(house, max_tokens=40, stream=True)
        second = await ask(house, max_tokens=40)
        refused = await ask(house, max_tokens=58)
        used = second.json()["usage"]["total_tokens"]
        sent = len(house.workers[0].submits)

    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 20 - prompt
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == 20 - prompt - used
    assert refused.headers["retry-after"] == str(2 * used)  # it needs a full minute's worth
    assert limited(refused, "rate_limit_exceeded")
    assert "60 tokens a minute" in refused.json()["error"]["message"]
    assert sent == 2


async def test_an_answer_without_a_bound_is_paid_for_afterwards(
    open_house, scripts, keys_file
) -> None:
    text = "this is a story about a house " * 5
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    async with open_house(
        scripts.says(text), api_keys_file=keys_file(tokens_per_minute=30)
    ) as house:
        first = await house.client.post("/v1/chat/completions", json=chat, headers=HEADERS)
        refused = await ask(house, max_tokens=1)

    assert first.json()["usage"]["total_tokens"] > 30
    assert limited(refused, "rate_limit_exceeded")


async def test_what_no_worker_did_costs_no_tokens(open_house, scripts, keys_file) -> None:
    async with open_house(
        scripts.fails(code="internal_error", http_status=500, message="broken"),
        api_keys_file=keys_file(tokens_per_minute=60),
    ) as house:
        await house.workers[0].kill()
        await house.until(lambda: not house.gateway.workers.accepting)
        lost = await ask(house, max_tokens=50)
        allowance = house.gateway.tenants.find("k").allowance
        headers = dict(allowance.headers())

    assert lost.status_code == 503
    assert headers["x-ratelimit-remaining-tokens"] == "60"


async def test_no_more_requests_at_once_than_agreed(open_house, scripts, keys_file) -> None:
    async with open_house(scripts.silent, api_keys_file=keys_file(max_concurrent=2)) as house:
        running = [asyncio.create_task(ask(house)) for _ in range(2)]
        await house.until(lambda: len(house.workers[0].submits) == 2)
        refused = await ask(house)
        running[0].cancel()
        await house.until(lambda: house.gateway.num_inflight == 1)
        running.append(asyncio.create_task(ask(house)))
        await house.until(lambda: len(house.workers[0].submits) == 3)
        house.gateway.abort_all()
        await asyncio.gather(*running, return_exceptions=True)

    assert limited(refused, "tenant_concurrency_exceeded")


async def test_a_request_of_many_reads_has_no_more_computed_at_once_than_agreed(
    open_house, scripts, keys_file
) -> None:
    scores, under_way, most = scripts.scores(-0.1, -3.0), 0, 0
    as_many_as_may = asyncio.Event()

    async def counted(submit: pb.Submit, emit: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if most >= 3:
            as_many_as_may.set()
        await as_many_as_may.wait()
        # One that is too many would come now.
        await asyncio.sleep(0.001)
        under_way -= 1  # before the gateway knows that it has ended
        await scores(submit, emit)

    async with open_house(counted, api_keys_file=keys_file(max_concurrent=3)) as house:
        body = {"input": [f"number {n}" for n in range(40)], "labels": ["yes", "no"]}
        asked = [house.client.post("/v1/classify", json=body, headers=HEADERS) for _ in range(2)]
        answers = await asyncio.gather(*asked)
        submits = house.workers[0].submits

    assert [len(answer.json()["data"]) for answer in answers] == [40, 40]
    assert most == 3
    assert {submit.tenant for submit in submits} == {"acme"}
    turns = [submit.part_of for submit in submits[3:60]]
    assert len(set(turns)) == 2, "one of the requests waited for all of the other"


async def test_who_waits_for_each_answer_has_one_at_a_time(open_house, scripts, keys_file) -> None:
    async with open_house(scripts.says("yes"), api_keys_file=keys_file(max_concurrent=1)) as house:
        answers = [await ask(house, stream=bool(i % 2)) for i in range(40)]

    assert {answer.status_code for answer in answers} == {200}


async def test_openais_client_sees_a_rate_limit(open_house, scripts, keys_file) -> None:
    async with open_house(
        scripts.says("yes"), api_keys_file=keys_file(requests_per_minute=1)
    ) as house:

        def call() -> str:
            client = openai.OpenAI(base_url=f"{house.url}/v1", api_key="k", max_retries=0)
            with client:
                client.completions.create(model="tiny", prompt="hello", max_tokens=4)
                with pytest.raises(openai.RateLimitError) as caught:
                    client.completions.create(model="tiny", prompt="hello", max_tokens=4)
            return str(caught.value.code)

        code = await asyncio.to_thread(call)

    assert code == "rate_limit_exceeded"
