"""Batches of several tenants and of several gateways, on little room."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.api_keys import DEFAULT_TENANT
from moesaic.batch.journal import Journal
from moesaic.batch.state import Batch
from moesaic.services.gateway.batches import carry, runner
from moesaic.services.gateway.files.disk import new_id
from moesaic.services.gateway.files.shelf import BatchRecord
from moesaic.services.gateway.files.store import Store, Unfinished
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.batches.batch_client import (
    URL,
    encoded,
    ended,
    keys_of,
    line,
    lines_of,
    submit,
    talk,
)


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
            hold_at_once(tmp_path, other, batch, lock, claim)
            # When the gateway looks for one that came later, it looks at this one as well.
            await talk(house, lambda c: ended(c, submit(c, encoded(line("later")))))
            held = await talk(house, lambda c: c.batches.retrieve(batch.id))
        found = await talk(house, lambda c: ended(c, held))

    assert held.status == "validating"
    assert found.status == "completed"


def hold_at_once(
    files: Path, store: Store, batch: Batch, lock: Unfinished, claim: ExitStack
) -> None:
    """Add a batch that nobody else can claim: until it is there, it is only announced."""
    (files / "unfinished" / lock.name).touch()
    assert claim.enter_context(store.claimed(lock))
    store.of(lock.tenant).add_batch(BatchRecord(batch=batch))


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
