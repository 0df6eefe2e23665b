"""The life of a batch, on a real gateway: answered, refused, cancelled, expired."""

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.batch.state import WINDOW_S
from moesaic.errors import Overloaded, PeerLost
from moesaic.services.gateway.batches import carry, runner
from moesaic.services.gateway.batches.within import after_others
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.batches.batch_client import (
    URL,
    encoded,
    ended,
    kept,
    line,
    lines_of,
    submit,
    talk,
)
from tests.waiting import eventually, until


async def test_a_batch_is_answered_as_the_routes_would(open_house, scripts, tmp_path: Path) -> None:
    metadata = {"for": "a test"}

    def work(client: openai.OpenAI) -> Any:
        content = encoded(
            line("b"),
            line("a", max_tokens=2),
            line("bad", temperature=9),
            json.dumps(line("no UTF-8", prompt="?")).encode().replace(b"?", b"\xff") + b"\n",
            json.dumps(line("number")).replace('"a"', "1" * 5000).encode() + b"\n",
        )
        batch = ended(client, submit(client, content, metadata=metadata))
        assert [found.id for found in client.batches.list(limit=1)] == [batch.id]
        output, errors = (
            lines_of(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)
        )
        file = client.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert [file.id for file in client.files.list()][-1] == batch.input_file_id
        return batch, output, errors

    async with open_house(scripts.says("this is a story"), files_dir=str(tmp_path)) as house:
        batch, output, errors = await talk(house, work)
        [submit_, _] = house.workers[0].submits

    assert (batch.status, batch.endpoint, batch.metadata) == ("completed", URL, metadata)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
    assert [result["custom_id"] for result in output] == ["b", "a"]
    response = output[0]["response"]
    assert (response["status_code"], output[0]["error"]) == (200, None)
    assert response["body"]["choices"][0]["text"] == "this is a story"
    assert response["request_id"].startswith(batch.id)
    used = [result["response"]["body"]["usage"] for result in output]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in used)
    assert [result["custom_id"] for result in errors] == ["bad", "no UTF-8", "number"]
    assert {result["response"]["status_code"] for result in errors} == {400}
    assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times)
    assert batch.expires_at == batch.created_at + 86400
    assert submit_.priority == 1000
    assert kept(tmp_path, "tenant-default/batches/*/*") == ["batch.json"]
    assert not kept(tmp_path, "unfinished/*")


async def test_a_request_that_a_route_takes_is_not_too_large_for_a_batch(
    open_house, scripts, tmp_path: Path
) -> None:
    def work(client: openai.OpenAI) -> Any:
        asked = {"model": "tiny", "prompt": "äöü" * 30, "user": "ü" * 400}
        client.completions.create(**asked)
        whole = json.dumps(line("a", **asked), ensure_ascii=False).encode()
        return ended(client, submit(client, whole))

    async with open_house(
        scripts.says("yes"), files_dir=str(tmp_path), max_body_bytes=1100
    ) as house:
        batch = await talk(house, work)

    assert batch.request_counts.completed == 1


@pytest.mark.parametrize(
    "endpoint",
    ["/v1/classify", "/v1/decisions", "/rerank", "/v1/chat/completions", "/v1/embeddings"],
)
async def test_every_route_that_infers_can_be_the_endpoint(
    open_house, scripts, tmp_path: Path, endpoint: str
) -> None:
    body = {
        "/v1/classify": {"labels": ["yes", "no"], "input": "hello"},
        "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
        "/rerank": {"query": "a", "documents": ["b"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
        "/v1/embeddings": {"input": "hello"},
    }[endpoint]
    of_endpoint = {
        "/v1/chat/completions": scripts.says("yes"),
        "/v1/embeddings": scripts.pools([1.0] * 16),
    }
    script = of_endpoint.get(endpoint, scripts.scores(-0.1, -2.0))

    async with open_house(script, files_dir=str(tmp_path)) as house:
        content = encoded({**line("a", endpoint), "body": body})
        batch = await talk(house, lambda c: ended(c, submit(c, content, endpoint)))

    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert batch.usage.total_tokens > 0


async def test_an_input_with_bad_lines_fails_as_a_whole_and_says_which(
    open_house, tmp_path: Path
) -> None:
    content = encoded(
        line("a"), b"{\n", line("a"), line("c", "/v1/chat/completions"), line("d", stream=True)
    )

    def work(client: openai.OpenAI) -> Any:
        return (
            ended(client, submit(client, content)),
            ended(client, submit(client, b"\n")),
        )

    async with open_house(files_dir=str(tmp_path)) as house:
        batch, empty = await talk(house, work)

    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_endpoint"),
        (5, "unsupported_parameter"),
    ]
    assert [error.code for error in empty.errors.data] == ["empty_file"]


async def test_an_input_of_blank_lines_is_not_read_to_its_end(
    open_house, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "MAX_LINES", 2)

    async with open_house(files_dir=str(tmp_path)) as house:
        content = encoded(line("a"), b"\n" * 4, line("b"))
        batch = await talk(house, lambda c: ended(c, submit(c, content)))

    [error] = batch.errors.data
    assert (batch.status, error.code, error.line) == ("failed", "too_many_lines", 5)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"input_file_id": "file-1"}, "input_file_id"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"half": "\ud800"}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_what_is_wrong_with_a_new_batch_is_named(
    open_house, tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        file = await house.client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": URL,
            "completion_window": "24h",
            **change,
        }
        headers = {"content-type": "application/json"}
        response = await house.client.post("/v1/batches", content=json.dumps(body), headers=headers)

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


async def test_a_cancelled_batch_keeps_what_is_answered_and_tells_of_the_rest(
    open_house, scripts, tmp_path: Path
) -> None:
    says = scripts.says("yes")

    async def script(submit: pb.Submit, emit) -> None:
        if len(house.workers[0].submits) <= 2:
            await says(submit, emit)

    def begin(client: openai.OpenAI) -> Any:
        batch = submit(client, encoded(*(line(f"r{n}") for n in range(40))))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
        return batch

    def cancel(client: openai.OpenAI) -> Any:
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        found = ended(client, batch)
        assert client.batches.cancel(batch.id) == found
        return found, lines_of(client, found.output_file_id), lines_of(client, found.error_file_id)

    async with open_house(script, files_dir=str(tmp_path), batch_max_inflight=4) as house:
        batch = await talk(house, begin)
        await house.until(lambda: len(house.workers[0].submits) == 6)
        found, output, errors = await talk(house, cancel)
        await house.until(lambda: house.workers[0].cancels.qsize() == 4)
        outcomes = [e["outcome"] for e in house.logs if e.get("route") == URL]

    assert found.status == "cancelled"
    assert outcomes == ["done"] * 2 + ["cancelled"] * 4
    assert found.cancelled_at >= found.cancelling_at
    assert len(output) == 2
    assert {result["error"]["code"] for result in errors} == {"batch_cancelled"}
    ids = sorted(result["custom_id"] for result in output + errors)
    assert ids == sorted(f"r{n}" for n in range(40))


async def test_a_batch_that_has_ended_cannot_be_cancelled(
    open_house, scripts, tmp_path: Path
) -> None:
    def work(client: openai.OpenAI) -> openai.BadRequestError:
        batch = ended(client, submit(client, encoded(line("a"))))
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.cancel(batch.id)
        return caught.value

    async with open_house(scripts.says("yes"), files_dir=str(tmp_path)) as house:
        assert "completed" in (await talk(house, work)).message


async def test_a_batch_that_is_not_done_in_time_expires_with_what_it_has(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says, ahead_s = scripts.says("yes"), 0
    monkeypatch.setattr(carry, "_now", lambda: int(time.time()) + ahead_s)

    async def script(submit: pb.Submit, emit) -> None:
        if len(house.workers[0].submits) == 1:
            await says(submit, emit)

    def work(client: openai.OpenAI) -> Any:
        nonlocal ahead_s
        batch = submit(client, encoded(line("a"), line("b"), line("c")))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
        ahead_s = WINDOW_S["24h"]
        batch = ended(client, batch)
        return batch, lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)

    async with open_house(script, files_dir=str(tmp_path), batch_max_inflight=1) as house:
        batch, output, errors = await talk(house, work)

    assert batch.status == "expired"
    assert batch.expired_at >= batch.expires_at
    assert [result["custom_id"] for result in output] == ["a"]
    assert [(r["custom_id"], r["error"]["code"]) for r in errors] == [
        ("b", "batch_expired"),
        ("c", "batch_expired"),
    ]


async def test_a_batch_waits_until_the_suite_is_ready_and_through_refusals(
    open_house, scripts, tmp_path: Path
) -> None:
    says = scripts.says("yes")

    async def script(submit: pb.Submit, emit) -> None:
        if len(house.workers[0].submits) <= 2:
            failure = pb.Failure(
                code="expert_unavailable", message="x", http_status=503, retryable=True
            )
            emit(failure=failure)
        else:
            await says(submit, emit)

    async with open_house(files_dir=str(tmp_path)) as house:
        batch = await talk(house, lambda c: submit(c, encoded(line("a"), line("b"))))

        async def is_carried_out() -> bool:
            found = await talk(house, lambda c: c.batches.retrieve(batch.id))
            return found.status != "validating"

        await until(is_carried_out)
        await house.add(script)
        found = await talk(house, lambda c: ended(c, batch))

    assert (found.status, found.request_counts.completed) == ("completed", 2)


async def test_a_request_that_fails_again_and_again_is_given_up(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.batch.retries.FIRST_WAIT_S", 0.01)
    failure = {"message": "boom", "http_status": 500, "retryable": True, "retry_after_s": 0.01}

    async with open_house(
        scripts.fails(code="internal_error", **failure), files_dir=str(tmp_path)
    ) as house:
        found = await talk(house, lambda c: ended(c, submit(c, encoded(line("a")))))
        tries = len(house.workers[0].submits)

    assert (found.status, found.request_counts.failed, tries) == ("completed", 1, 4)


MESSAGES = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


async def test_a_message_of_a_batch_waits_through_overloads_however_many(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.batch.retries.LONGEST_WAIT_S", 0.01)
    refusals = 0

    def refuse(*_: Any) -> None:
        nonlocal refusals
        if refusals < runner.MAX_FAILURES + 2:
            refusals += 1
            raise Overloaded("full")

    async with open_house(scripts.says("yes"), files_dir=str(tmp_path)) as house:
        content = encoded({**line("a", "/v1/messages"), "body": MESSAGES})
        monkeypatch.setattr(house.gateway, "admit", refuse)
        found = await talk(house, lambda c: ended(c, submit(c, content, "/v1/messages")))

    assert refusals == runner.MAX_FAILURES + 2
    assert (found.status, found.request_counts.completed) == ("completed", 1)


async def test_a_message_of_a_batch_that_loses_each_worker_is_given_up(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.batch.retries.LONGEST_WAIT_S", 0.01)
    tries = 0

    def refuse(*_: Any) -> None:
        nonlocal tries
        tries += 1
        # Without an end the batch would go on for ever.
        if tries <= 2 * runner.MAX_FAILURES:
            raise PeerLost("attention-1", "connection broke")

    async with open_house(scripts.says("yes"), files_dir=str(tmp_path)) as house:
        content = encoded({**line("a", "/v1/messages"), "body": MESSAGES})
        monkeypatch.setattr(house.gateway, "admit", refuse)
        found = await talk(house, lambda c: ended(c, submit(c, content, "/v1/messages")))

    assert (found.request_counts.failed, tries) == (1, runner.MAX_FAILURES)


async def test_the_input_may_be_deleted_while_its_batch_runs(
    open_house, scripts, tmp_path: Path
) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        batch = await talk(house, lambda c: submit(c, encoded(line("a"), line("b"))))
        await talk(house, lambda c: c.files.delete(batch.input_file_id))
        await house.add(scripts.says("yes"))
        found = await talk(house, lambda c: ended(c, batch))

    assert (found.status, found.request_counts.completed) == ("completed", 2)


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ({}, 1000),
        ({"priority": None}, 1000),
        ({"priority": -5}, 1000),
        ({"priority": 5000}, 5000),
        ({"moesaic": {"priority": 7000}}, 7000),
        ({"priority": "high"}, "high"),
        ({"priority": True}, True),
    ],
)
def test_a_batch_never_goes_before_others(body: dict[str, Any], priority: Any) -> None:
    for more in ({}, {"prompt": "}"}):
        after = json.loads(after_others(json.dumps({**more, **body}).encode()))
        assert after == {**more, **body, "priority": priority}
