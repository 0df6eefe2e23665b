"""Files on a real gateway: kept, limited, removed, and read by nobody else."""

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.errors import InvalidInput
from moesaic.services.gateway.files.disk import made_at, new_id
from moesaic.services.gateway.files.shelf import StoredFile
from moesaic.services.gateway.files.store import Store
from moesaic.services.gateway.routes import files
from tests.gateway.batches.batch_client import (
    encoded,
    kept,
    line,
    talk,
)


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
    monkeypatch.setattr("moesaic.services.gateway.files.shelf.MAX_FILES", 2)
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
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {1 << 30}\r\n\r\n"
        writer.write(head.encode())
        status = await reader.readline()
        writer.close()

    assert b" 413 " in status


async def test_a_file_whose_length_nobody_told_is_cut_off_at_the_limit(
    open_house, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.services.gateway.files.upload.MAX_FILE_BYTES", 3 << 20)

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


def test_no_directory_that_it_makes_is_open_to_others(tmp_path: Path) -> None:
    Store(tmp_path / "run" / "files", 1, 1.0)

    modes = [(tmp_path / path).stat().st_mode & 0o777 for path in ("run", "run/files")]
    assert modes == [0o700, 0o700]


async def test_a_head_request_reads_no_content(
    open_house, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"files": {"file": ("a.jsonl", b"{}\n" * 300_000)}, "data": {"purpose": "batch"}}
    asked: list[object] = []

    async def on_disk(work: Any) -> Any:
        asked.append(work)
        return work()

    async with open_house(files_dir=str(tmp_path)) as house:
        stored = (await house.client.post("/v1/files", **form)).json()["id"]
        monkeypatch.setattr(files, "on_disk", on_disk)
        answer = await house.client.head(f"/v1/files/{stored}/content")

    assert answer.headers["content-length"] == "900000"
    assert len(asked) == 1  # to open it
