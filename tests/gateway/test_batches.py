"""Files and batches over REST, with the client that people use."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from moesaic.api_keys import DEFAULT_TENANT, digest_of
from moesaic.batch.journal import Journal
from moesaic.batch.state import WINDOW_S, Batch
from moesaic.errors import InvalidInput
from moesaic.v1 import attention_pb2 as pb
from services.gateway.batches import carry, runner
from services.gateway.batches.disk import made_at, new_id
from services.gateway.batches.runner import LOOK_EVERY_S
from services.gateway.batches.shelf import Record, StoredFile
from services.gateway.batches.store import Store, Unfinished
from services.gateway.batches.within import after_others

URL = "/v1/completions"
T = TypeVar("T")


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a", **body}}


def encoded(*lines: Any) -> bytes:
    return b"".join(v if isinstance(v, bytes) else json.dumps(v).encode() + b"\n" for v in lines)


def connect(house, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0)


async def talk(house, work: Callable[[openai.OpenAI], T], key: str = "none") -> T:
    def connected() -> T:
        with connect(house, key) as client:
            return work(client)

    return await asyncio.to_thread(connected)


def submit(client: openai.OpenAI, content: bytes, endpoint: str = URL, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def keys_of(directory: Path, *names: str, **terms: Any) -> str:
    """A file of tenants, each with the key ``key-NAME``."""
    tenants = [
        {"name": name, "keys": [digest_of(f"key-{name}")], "scopes": ["infer", "batch"], **terms}
        for name in names
    ]
    (directory / "keys.json").write_text(json.dumps({"tenants": tenants}))
    return str(directory / "keys.json")


def kept(root: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in root.glob(pattern))


# Files


async def test_a_file_is_kept_listed_read_and_deleted(open_house, tmp_path: Path) -> None:
    content = encoded(line("a")) * 50_000  # several pieces of a body, and of an answer

    def work(client: openai.OpenAI) -> None:
        first = client.files.create(file=("first.jsonl", content), purpose="batch")
        second = client.files.create(
            file=("second.jsonl", b""),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )

        assert (first.bytes, first.filename, first.purpose) == (
            len(content),
            "first.jsonl",
            "batch",
        )
        assert (first.object, first.status, first.expires_at) == ("file", "processed", None)
        assert second.expires_at == second.created_at + 3600
        assert client.files.retrieve(first.id) == first
        assert client.files.content(first.id).read() == content
        assert [file.id for file in client.files.list()] == [second.id, first.id]
        assert [file.id for file in client.files.list(limit=1, order="asc")] == [
            first.id,
            second.id,
        ]
        assert not client.files.list(purpose="batch_output").data
        assert client.files.delete(second.id).deleted
        assert [file.id for file in client.files.list(after=second.id)] == [first.id]
        assert not client.files.list(after=first.id).data
        assert client.files.delete(first.id).deleted
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                gone(first.id)

    async with open_house(files_dir=str(tmp_path), max_body_bytes=1024) as house:
        await talk(house, work)
    assert not kept(tmp_path, "**/.new-*")


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "assistants"}}, "purpose"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, "file"),
        ({"data": {"purpose": "batch"}}, "body"),
        ({"json": {}}, "body"),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 2000}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {f"f{n}": "" for n in range(20)}}, "body"),
        (
            {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            "body",
        ),
        ({"content": b"y", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "body"),
        ({"files": {"n" * 100_000: b"x"}, "data": {"purpose": "batch"}}, "body"),
        (
            {
                "files": {"file": b"x"},
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "5",
                },
            },
            "expires_after[seconds]",
        ),
    ],
)
async def test_what_is_wrong_with_an_upload_is_named_and_nothing_of_it_is_kept(
    open_house, tmp_path: Path, parts: dict[str, Any], param: str
) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        response = await house.client.post("/v1/files", **parts)
        listed = (await house.client.get("/v1/files")).json()

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert listed["data"] == []
    assert not kept(tmp_path, "**/.new-*")


async def test_a_tenant_cannot_keep_more_than_its_quota(open_house, tmp_path: Path) -> None:
    def work(client: openai.OpenAI) -> list[Any]:
        half = b"x" * 600_000
        first = client.files.create(file=half, purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=half, purpose="batch")
        client.files.delete(first.id)
        client.files.create(file=half, purpose="batch")
        return [caught.value.status_code, caught.value.code]

    async with open_house(files_dir=str(tmp_path), files_quota_bytes=1 << 20) as house:
        assert await talk(house, work) == [413, "storage_quota_exceeded"]


async def test_a_tenant_cannot_keep_files_without_number(
    open_house, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.shelf.MAX_FILES", 2)
    upload = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}

    async with open_house(files_dir=str(tmp_path)) as house:
        answers = [await house.client.post("/v1/files", **upload) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 413]
    error = answers[-1].json()["error"]
    assert (error["code"], "2 files" in error["message"]) == ("storage_quota_exceeded", True)


async def test_a_file_that_is_too_large_is_refused_unread(open_house, tmp_path: Path) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        await house.client.get("/livez")  # it listens
        reader, writer = await asyncio.open_connection("127.0.0.1", house.client.base_url.port)
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 30}\r\n\r\n"
        writer.write(head.encode())
        status = await reader.readline()
        writer.close()

    assert b" 413 " in status


async def test_a_file_whose_length_nobody_told_is_cut_off_at_the_limit(
    open_house, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.upload.MAX_FILE_BYTES", 3 << 20)

    async def body():
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(64):
            yield b"y" * (64 << 10)
        yield b"\r\n--x--\r\n"

    async with open_house(files_dir=str(tmp_path)) as house:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        response = await house.client.post("/v1/files", content=body(), headers=headers)

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert not kept(tmp_path, "tenant-*/files/*") + kept(tmp_path, "tenant-*/files/.*")


async def test_without_a_directory_the_routes_name_the_flag(open_house) -> None:
    async with open_house() as house:
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
            response = await house.client.get(path)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "route_not_enabled"
            assert "--files-dir" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["file-1", "..", "%2e%2e", "file-" + "0" * 28, "%00", "a%2f..%2fb"]
)
async def test_no_id_leads_out_of_the_directory(open_house, tmp_path: Path, name: str) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert (await house.client.get(path)).status_code == 404


# Batches


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


@pytest.mark.parametrize("endpoint", ["/v1/classify", "/classify", "/v1/chat/completions"])
async def test_every_route_that_infers_can_be_the_endpoint(
    open_house, scripts, tmp_path: Path, endpoint: str
) -> None:
    body = {
        "labels": ["yes", "no"],
        "input": "hello",
        "messages": [{"role": "user", "content": "hello"}],
    }
    script = scripts.scores(-0.1, -2.0) if "classify" in endpoint else scripts.says("yes")

    async with open_house(script, files_dir=str(tmp_path)) as house:
        content = encoded(line("a", endpoint, **body))
        batch = await talk(house, lambda c: ended(c, submit(c, content, endpoint)))

    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


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
        while client.batches.retrieve(batch.id).request_counts.completed < 2:
            time.sleep(0.05)
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
        while client.batches.retrieve(batch.id).request_counts.completed < 1:
            time.sleep(0.05)
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
        while (await talk(house, lambda c: c.batches.retrieve(batch.id))).status == "validating":
            await asyncio.sleep(0.02)
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


async def test_the_input_may_be_deleted_while_its_batch_runs(
    open_house, scripts, tmp_path: Path
) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        batch = await talk(house, lambda c: submit(c, encoded(line("a"), line("b"))))
        await talk(house, lambda c: c.files.delete(batch.input_file_id))
        await house.add(scripts.says("yes"))
        found = await talk(house, lambda c: ended(c, batch))

    assert (found.status, found.request_counts.completed) == ("completed", 2)


async def test_tenants_see_nothing_of_each_other(open_house, scripts, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "ann", "bob", scopes=["batch"])

    def own(client: openai.OpenAI) -> Any:
        return ended(client, submit(client, encoded(line("a"))))

    def foreign(client: openai.OpenAI) -> None:
        assert not client.files.list().data
        assert not client.batches.list().data
        for ask in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(batch.output_file_id)
        with pytest.raises(openai.BadRequestError):
            client.batches.create(
                input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"
            )

    files = tmp_path / "files"
    async with open_house(scripts.says("yes"), files_dir=str(files), api_keys_file=keys) as house:
        batch = await talk(house, own, "key-ann")
        await talk(house, foreign, "key-bob")
        finished = [entry for entry in house.logs if entry.get("route") == URL]

    assert batch.request_counts.completed == 1  # although the key alone allows no inference
    assert [entry["tenant"] for entry in finished] == ["ann"]


async def test_what_another_process_carries_out_is_taken_over_when_that_ends(
    open_house, scripts, tmp_path: Path
) -> None:
    async with open_house(scripts.says("yes"), files_dir=str(tmp_path)) as house:
        file = await talk(house, lambda c: c.files.create(file=encoded(line("a")), purpose="batch"))
        other = Store(tmp_path, 1 << 30, 86400)
        batch = Batch(
            id=new_id("batch_"),
            endpoint=URL,
            input_file_id=file.id,
            completion_window="24h",
            created_at=int(time.time()),
            expires_at=int(time.time()) + 100,
        )
        with ExitStack() as claim:
            lock = Unfinished(DEFAULT_TENANT, batch.id)
            hold_at_once(other, batch, lock, claim)
            await asyncio.sleep(1.5 * LOOK_EVERY_S)
            held = await talk(house, lambda c: c.batches.retrieve(batch.id))
        found = await talk(house, lambda c: ended(c, held))

    assert held.status == "validating"
    assert found.status == "completed"


def hold_at_once(store: Store, batch: Batch, lock: Unfinished, claim: ExitStack) -> None:
    """Add a batch that nobody else can claim: until it is there, it is only announced."""
    (store._unfinished / lock.name).touch()
    assert claim.enter_context(store.claimed(lock))
    store.of(lock.tenant).add_batch(Record(batch=batch))


async def test_two_gateways_on_one_directory_answer_each_request_once(
    open_house, scripts, tmp_path: Path
) -> None:
    script = scripts.says("yes")
    async with (
        open_house(script, files_dir=str(tmp_path)) as one,
        open_house(script, files_dir=str(tmp_path)) as other,
    ):
        content = encoded(*(line(f"r{n}") for n in range(30)))
        batches = [await talk(house, lambda c: submit(c, content)) for house in (one, other) * 3]
        found = [await talk(other, lambda c, b=b: ended(c, b)) for b in batches]
        asked = len(one.workers[0].submits) + len(other.workers[0].submits)

    assert {batch.request_counts.completed for batch in found} == {30}
    assert asked == 30 * len(batches)


async def test_an_upload_that_breaks_off_leaves_nothing(open_house, tmp_path: Path) -> None:
    async def broken():
        yield (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 99
        )
        raise RuntimeError

    async with open_house(files_dir=str(tmp_path)) as house:
        with pytest.raises(RuntimeError):
            await house.client.post(
                "/v1/files",
                content=broken(),
                headers={"content-type": "multipart/form-data; boundary=x"},
            )
        await house.until(lambda: any(e["event"] == "request.finished" for e in house.logs))
        [entry] = [e for e in house.logs if e["event"] == "request.finished"]

    assert (entry["status"], entry["outcome"]) == (499, "cancelled")
    assert not kept(tmp_path, "tenant-*/files/*") + kept(tmp_path, "tenant-*/files/.*")


async def test_a_download_that_is_broken_off_is_not_done(open_house, tmp_path: Path) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        upload = {"files": {"file": b"x" * (32 << 20)}, "data": {"purpose": "batch"}}
        file = (await house.client.post("/v1/files", **upload)).json()
        async with house.client.stream("GET", f"/v1/files/{file['id']}/content") as response:
            await anext(response.aiter_raw(1000))
        await house.until(lambda: sum(e["event"] == "request.finished" for e in house.logs) == 2)
        entry = house.logs[-1]

    assert (entry["status"], entry["outcome"]) == (200, "cancelled")
    assert entry["code"] == "client_closed_request"


async def test_a_tenant_without_room_gets_what_fits_and_is_told_of_the_rest(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carry, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(carry, "ROOM_EVERY", 1)

    def work(client: openai.OpenAI) -> Any:
        client.files.create(file=b"x" * 900_000, purpose="batch")
        batch = submit(client, encoded(*(line(f"r{n}") for n in range(400))))
        batch = ended(client, batch)
        return batch, lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)

    async with open_house(
        scripts.says("this is a story"), files_dir=str(tmp_path), files_quota_bytes=1 << 20
    ) as house:
        batch, output, errors = await talk(house, work)

    assert batch.status == "completed"
    assert {result["error"]["code"] for result in errors} == {"storage_quota_exceeded"}
    assert 0 < len(output) < 400
    assert sorted(r["custom_id"] for r in output + errors) == sorted(f"r{n}" for n in range(400))


async def test_a_full_disk_interrupts_a_batch_which_then_goes_on(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "REST_S", 0.1)
    write, num_full = Journal.write, 3

    def full_at_first(journal: Journal, results: Any) -> None:
        nonlocal num_full
        if num_full:
            num_full -= 1
            write(journal, results[:1])
            raise OSError(28, "No space left on device")
        write(journal, results)

    monkeypatch.setattr(Journal, "write", full_at_first)
    async with open_house(scripts.says("yes"), files_dir=str(tmp_path)) as house:
        content = encoded(*(line(f"r{n}") for n in range(60)))
        batch = await talk(house, lambda c: ended(c, submit(c, content)))
        output = await talk(house, lambda c: lines_of(c, batch.output_file_id))

    assert num_full == 0
    assert [result["custom_id"] for result in output] == [f"r{n}" for n in range(60)]


async def test_a_damaged_document_hides_nothing_but_itself(
    open_house, scripts, tmp_path: Path
) -> None:
    def damage(client: openai.OpenAI) -> None:
        whole, damaged = (client.files.create(file=b"x", purpose="batch") for _ in range(2))
        (tmp_path / "tenant-default" / "files" / damaged.id / "file.json").write_bytes(b"{")

        assert [file.id for file in client.files.list()] == [whole.id]
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(damaged.id)

    async with open_house(files_dir=str(tmp_path)) as house:
        await talk(house, damage)


async def test_a_tenant_whose_batches_get_nowhere_keeps_nobody_from_having_one(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_RUNNING", 2)
    keys = keys_of(tmp_path, "ann", "bob")

    async def script(submit_: pb.Submit, emit: Any) -> None:
        if "bob" in submit_.cache_salt:
            await scripts.says("yes")(submit_, emit)

    files = str(tmp_path / "files")
    async with open_house(script, files_dir=files, api_keys_file=keys) as house:
        for _ in range(3):
            await talk(house, lambda c: submit(c, encoded(line("a"))), "key-ann")
        await house.until(lambda: len(house.workers[0].submits) == 2)
        batch = await talk(house, lambda c: ended(c, submit(c, encoded(line("b")))), "key-bob")
        asked = [s.cache_salt for s in house.workers[0].submits]

    assert batch.request_counts.completed == 1
    assert sum("ann" in salt for salt in asked) == 2  # the third one waits


async def test_a_batch_asks_for_no_more_at_once_than_its_tenant_may_have(
    open_house, scripts, tmp_path: Path
) -> None:
    keys = keys_of(tmp_path, "ann", max_concurrent=1)
    content = encoded(*(line(f"r{n}") for n in range(6)))

    files = str(tmp_path / "files")
    async with open_house(scripts.says("yes"), files_dir=files, api_keys_file=keys) as house:
        batch = await talk(house, lambda c: ended(c, submit(c, content)), "key-ann")
        asked = [e for e in house.logs if e["event"] == "request.finished"]
        statuses = [e["status"] for e in asked if e["request_id"].startswith(batch.id)]

    assert batch.request_counts.completed == 6
    assert statuses == [200] * 6  # none was refused


async def test_batches_have_the_limits_of_their_tenant_counted_apart(
    open_house, scripts, tmp_path: Path
) -> None:
    keys = keys_of(tmp_path, "ann", max_concurrent=1)

    async def script(submit_: pb.Submit, emit: Any) -> None:
        if submit_.priority == 0:
            await scripts.says("yes")(submit_, emit)

    files = str(tmp_path / "files")
    async with open_house(script, files_dir=files, api_keys_file=keys) as house:
        for name in ("a", "b"):
            await talk(house, lambda c, name=name: submit(c, encoded(line(name))), "key-ann")
        await house.until(lambda: bool(house.workers[0].submits))
        answer = await talk(
            house, lambda c: c.completions.create(model="tiny", prompt="a"), "key-ann"
        )
        await house.until(lambda: any(e.get("status") == 429 for e in house.logs))
        waiting = [s for s in house.workers[0].submits if s.priority]

    assert answer.choices[0].text == "yes"
    assert len(waiting) == 1


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


def test_what_expired_or_was_kept_long_enough_is_removed(tmp_path: Path) -> None:
    now = 10**9
    shelf = Store(tmp_path, 1 << 30, 1000).of("ann")
    ages = {"old": (2000, None), "expired": (10, 5), "expires": (10, 100), "young": (999, None)}
    ids = {}
    for name, (age_s, keep_s) in ages.items():
        made = now - age_s
        ids[name] = f"file-{made * 1000:012x}{len(ids):016x}"
        file = StoredFile(
            id=ids[name],
            bytes=0,
            created_at=made,
            expires_at=made + keep_s if keep_s else None,
            filename=name,
            purpose="batch",
        )
        with shelf.new_file(ids[name]) as directory:
            shelf.finish_file(directory, file)
    damaged = f"batch_{(now - 2000) * 1000:012x}{0:016x}"
    shelf.batch_directory(damaged).mkdir(parents=True)
    assert made_at(ids["old"]) == now - 2000
    assert 0 <= time.time() - made_at(new_id("file-")) < 60

    shelf.sweep(now, keep_s=1000)

    assert sorted(shelf.file_ids()) == sorted([ids["expires"], ids["young"]])
    assert shelf.batch_ids() == []


def test_what_cannot_be_a_directory_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InvalidInput, match="--files-dir: cannot use"):
        Store(tmp_path / "file", 1 << 30, 1000)
