import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from msgspec.structs import replace

from moesaic.services.gateway.workers import workers as streams
from moesaic.v1 import attention_pb2 as pb

TEXT = "this is a story about a house"
BODY = {"prompt": "hello", "max_tokens": 100, "temperature": 0.7}


def text_of(stream: str) -> str:
    data = [
        line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: ")
    ]
    chunks = [json.loads(item) for item in data[:-1]]
    assert data[-1] == "[DONE]"
    assert not any("error" in chunk for chunk in chunks), chunks
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("said", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_goes_on_where_a_lost_worker_left_it(
    open_house, scripts, said, stream
) -> None:
    dying = asyncio.Event()

    async def script(submit: pb.Submit, emit) -> None:
        for index, token_id in enumerate(scripts.ids(TEXT)[:said]):
            emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id]))
        dying.set()

    async with open_house(script, scripts.says(TEXT)) as house:
        first, second = house.workers
        asking = asyncio.ensure_future(
            house.client.post("/v1/completions", json={**BODY, "stream": stream})
        )
        await dying.wait()
        await house.heard(first)
        await first.kill()
        response = await asking
        [before], [after] = first.submits, second.submits

    text = text_of(response.text) if stream else response.json()["choices"][0]["text"]
    assert text == TEXT
    assert list(after.token_ids) == [*before.token_ids, *scripts.ids(TEXT)[:said]]
    assert after.attempt == 2
    assert after.generation.max_tokens == 100 - said
    assert after.generation.num_resumed_tokens == said  # penalties tell prompt from answer
    assert after.generation.sampling == before.generation.sampling
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len(scripts.ids(TEXT)) + 1
        # A lost worker that gave tokens and did not tell how may have degraded them.
        assert ("quality" in response.json()["moesaic"]) == (said == 0)


async def test_a_classification_is_run_again(open_house, scripts) -> None:
    async with open_house(scripts.silent, scripts.scores(-2.0, -1.0)) as house:
        first = house.workers[0]
        body = {"input": "a story", "labels": ["yes", "no"]}
        asking = asyncio.ensure_future(house.client.post("/v1/classify", json=body))
        await house.until(lambda: bool(first.submits))
        await first.kill()
        answer = (await asking).json()

    assert answer["data"][0]["label"] == "no"


@pytest.mark.parametrize("stream", [False, True])
async def test_losing_the_last_worker_is_an_error_that_says_to_retry(
    open_house, scripts, stream
) -> None:
    async def script(submit: pb.Submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=scripts.ids("yes")[:1]))

    async with open_house(script, recovery_s=0.1) as house:
        [worker] = house.workers
        asking = asyncio.ensure_future(
            house.client.post("/v1/completions", json={**BODY, "stream": stream})
        )
        await house.until(lambda: bool(worker.submits))
        await house.heard(worker)
        await worker.kill()
        response = await asking

    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"code":"worker_lost"' in response.text
    else:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_lost"
        assert response.headers["retry-after"]


async def test_a_request_that_two_workers_do_not_survive_is_not_tried_a_third_time(
    open_house, scripts
) -> None:
    async with open_house(scripts.silent, scripts.silent, scripts.says(TEXT)) as house:
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=BODY))
        for worker in house.workers[:2]:
            await house.until(lambda worker=worker: bool(worker.submits))
            await worker.kill()
        response = await asking

    assert response.status_code == 503
    assert not house.workers[2].submits


async def test_repeated_tokens_are_dropped_and_a_gap_moves_the_request(open_house, scripts) -> None:
    ids = scripts.ids(TEXT)

    async def script(submit: pb.Submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=ids[:3]))
        emit(tokens=pb.Tokens(token_index=1, token_ids=ids[1:4]))
        emit(tokens=pb.Tokens(token_index=6, token_ids=ids[6:7]))

    async with open_house(script, scripts.says(TEXT)) as house:
        response = await house.client.post("/v1/completions", json=BODY)
        cancel = await house.workers[0].cancels.get()
        [after] = house.workers[1].submits

    assert response.json()["choices"][0]["text"] == TEXT
    assert cancel.attempt == 1
    assert list(after.token_ids)[-4:] == ids[:4]


async def test_a_draining_worker_s_refusal_sends_the_request_elsewhere(open_house, scripts) -> None:
    refuses = scripts.fails(code="draining", message="draining", retryable=True, http_status=503)
    async with open_house(refuses, scripts.says(TEXT)) as house:
        response = await house.client.post("/v1/completions", json=BODY)

    assert response.json()["choices"][0]["text"] == TEXT


async def test_a_silent_worker_is_given_up(open_house, scripts) -> None:
    async with open_house(scripts.silent, scripts.says(TEXT), stream_idle_s=1.0) as house:
        response = await house.client.post("/v1/completions", json=BODY)

    assert response.json()["choices"][0]["text"] == TEXT


async def test_only_the_last_word_lost_is_no_loss(open_house, scripts) -> None:
    ids = scripts.ids(TEXT)

    async def script(submit: pb.Submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=ids))

    async with open_house(script) as house:
        [worker] = house.workers
        body = {**BODY, "max_tokens": len(ids)}
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=body))
        await house.until(lambda: bool(worker.submits))
        await house.heard(worker)
        await worker.kill()
        choice = (await asking).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_the_work(open_house, scripts, stream: bool) -> None:
    async with open_house(scripts.begins(TEXT)) as house:
        [worker] = house.workers
        body = {**BODY, "stream": stream}
        async with httpx.AsyncClient(base_url=house.url, verify=False) as client:
            asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await house.until(lambda: bool(worker.submits))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        cancel = await worker.cancels.get()
        await house.until(lambda: house.gateway.num_inflight == 0)

    assert cancel.request_id == worker.submits[0].request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_a_request(open_house, scripts, stream: bool) -> None:
    timeout_ms = 75
    async with open_house(scripts.silent) as house:
        [worker] = house.workers
        while not worker.submits:  # none got it in time
            timeout_ms *= 2
            headers = {"x-request-timeout-ms": str(timeout_ms)}
            response = await house.client.post(
                "/v1/completions", json={**BODY, "stream": stream}, headers=headers
            )
        await worker.cancels.get()

    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert 0 < worker.submits[0].deadline_ms <= timeout_ms


@pytest.mark.parametrize("told", ["0", "soon", "-1", "²", "9" * 5000])
async def test_a_deadline_that_means_nothing_changes_nothing(
    open_house, scripts, told: str
) -> None:
    async with open_house(scripts.says("yes"), request_timeout_s=200) as house:
        headers = {"x-request-timeout-ms": told.encode("latin-1")}
        response = await house.client.post("/v1/completions", json=BODY, headers=headers)
        deadline_ms = house.workers[0].submits[0].deadline_ms

    assert response.status_code == 200
    assert 100_000 < deadline_ms <= 200_000


async def test_a_deadline_within_a_stream_is_an_error_event(open_house, scripts) -> None:
    deadline_ms, status = 150, 504
    async with open_house(scripts.begins(TEXT)) as house:
        while status == 504:  # the stream had not begun in time
            deadline_ms *= 2
            body = {**BODY, "stream": True, "moesaic": {"deadline_ms": deadline_ms}}
            response = await house.client.post("/v1/completions", json=body)
            status = response.status_code

    assert '"code":"deadline_exceeded"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")


async def test_new_requests_go_to_workers_that_come_and_not_to_those_that_leave(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("yes")) as house:
        await house.add(scripts.says("no"))
        house.fleet.drop("attention-1")
        await house.until(lambda: len(house.gateway.workers.accepting) == 1)
        response = await house.client.post("/v1/completions", json=BODY)

    assert response.json()["choices"][0]["text"] == "no"


async def test_a_worker_that_is_back_is_used_again(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        [worker] = house.workers
        await worker.kill()
        await house.until(lambda: not house.gateway.workers.accepting)
        await worker.start(int(worker.address.rsplit(":", 1)[1]))
        await house.until(lambda: bool(house.gateway.workers.accepting))
        response = await house.client.post("/v1/completions", json=BODY)

    assert response.json()["choices"][0]["text"] == "yes"


async def test_a_lost_stream_leaves_no_task_behind(open_house, scripts) -> None:
    def writers() -> list[asyncio.Task]:
        tasks = asyncio.all_tasks()
        return [task for task in tasks if "_consume_request_iterator" in repr(task.get_coro())]

    async with open_house(scripts.silent) as house:
        [worker] = house.workers
        assert len(writers()) == 1
        await worker.kill()

        await house.until(lambda: not writers())


class _BreaksAndSwallows:
    """A stream that breaks when its reader is cancelled, as gRPC's do while they begin."""

    def __init__(self, begun: asyncio.Event) -> None:
        self._begun = begun

    async def __aiter__(self) -> AsyncIterator[pb.ExecuteResponse]:
        self._begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None
        yield pb.ExecuteResponse()

    def cancel(self) -> None:
        """Nothing to tell anybody."""


async def test_a_stream_that_breaks_as_it_is_given_up_is_not_opened_again(
    open_house, scripts, monkeypatch
) -> None:
    begun = asyncio.Event()

    class Stub:
        def __init__(self, connection: Any) -> None:
            pass

        def Execute(self, commands: Any) -> _BreaksAndSwallows:
            return _BreaksAndSwallows(begun)

    async with open_house(scripts.silent) as house:
        monkeypatch.setattr(streams, "AttentionServiceStub", Stub)
        await house.workers[0].kill()
        await house.workers[0].start(int(house.workers[0].address.rsplit(":", 1)[1]))
        await begun.wait()
        [following] = [t for t in asyncio.all_tasks() if "Workers.follow" in repr(t)]

        following.cancel()
        await asyncio.wait([following])

    assert following.cancelled()


@pytest.mark.parametrize(
    "address",
    ["", "\x00", "no port", "unix:/nowhere", "dns://", "[::", "h:99999999", "é:1", "x" * 256],
)
async def test_a_record_with_an_address_that_is_none_harms_no_other_worker(
    open_house, scripts, address: str
) -> None:
    async with open_house(scripts.says(TEXT)) as house:
        record = house.fleet.workers["attention-1"]
        odd = replace(record, worker_id="odd", admin_address=address)
        house.fleet.put(odd)
        following = [task for task in asyncio.all_tasks() if "Workers.follow" in repr(task)]
        for _ in range(3):
            response = await house.client.post("/v1/completions", json=BODY)
            assert response.json()["choices"][0]["text"] == TEXT
        assert not following[0].done()
