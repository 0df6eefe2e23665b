"""Stored responses: read, continued, bounded, removed, and seen by nobody else."""

from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.services.gateway.files import shelf, store
from moesaic.services.gateway.files.disk import BLOCK_BYTES, new_id, used_bytes
from moesaic.services.gateway.files.responses import ResponseShelf
from moesaic.services.gateway.files.shelf import Shelf
from moesaic.services.gateway.files.store import Store
from tests.gateway.batches.batch_client import ended, kept, keys_of, lines_of, submit, talk
from tests.gateway.routes.test_responses import events_of

SAID = "this is a story"


def create(client: openai.OpenAI, given: Any = "hello", **more: Any) -> Any:
    return client.responses.create(model="tiny", input=given, **more)


async def test_a_response_is_read_listed_and_deleted(open_house, scripts, tmp_path: Path) -> None:
    def work(client: openai.OpenAI) -> None:
        first = create(client, metadata={"a": "b"})
        assert client.responses.retrieve(first.id) == first
        [item] = client.responses.input_items.list(first.id).data
        assert (item.type, item.role, item.content[0].text) == ("message", "user", "hello")
        client.responses.delete(first.id)
        for gone in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                gone(first.id)

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        await talk(house, work)
    assert not kept(tmp_path, "**/.new-*")


async def test_a_conversation_goes_on_from_a_stored_response(
    open_house, scripts, tmp_path: Path
) -> None:
    def work(client: openai.OpenAI) -> None:
        first = create(client, instructions="music")
        second = create(client, "yes", previous_response_id=first.id)
        with client.responses.stream(
            model="tiny", input="no", previous_response_id=second.id
        ) as stream:
            third = stream.get_final_response()
        client.responses.delete(first.id)
        items = client.responses.input_items.list(third.id, order="asc", limit=2)
        texts = [item.content[0].text for item in items]  # over all pages
        assert texts == ["hello", SAID, "yes", SAID, "no"]
        assert len({item.id for item in items}) == 5
        backwards = [item.id for item in client.responses.input_items.list(third.id)]
        assert backwards == [item.id for item in items][::-1]
        assert client.responses.retrieve(third.id).previous_response_id == second.id

    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": SAID},
        {"role": "user", "content": "yes"},
    ]
    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        await talk(house, work)
        await house.client.post("/v1/chat/completions", json={"messages": turns})
        _, second, _, as_chat = house.workers[0].submits

    assert second.token_ids == as_chat.token_ids  # instructions are not carried over


async def test_only_what_an_item_is_made_of_is_stored(open_house, scripts, tmp_path: Path) -> None:
    much = "x" * 100_000
    said = {"type": "output_text", "text": "no", "annotations": [much], "logprobs": [much]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "b": much}], "c": much},
        {"role": "assistant", "content": [said], "arguments": much, "summary": []},
        {"type": "reasoning", "summary": [], "encrypted_content": much},
        {"role": "user", "content": "and"},
    ]

    def work(client: openai.OpenAI) -> None:
        first = create(client, items, include=["message.output_text.logprobs"])
        assert first.output[0].content[0].logprobs
        second = create(client, previous_response_id=first.id)
        told = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in told] == [
            *("message", "message", "reasoning", "message", "message", "message")
        ]
        assert told[1].content[0].annotations == []
        assert told[4].id == first.output[0].id
        assert not told[4].content[0].logprobs
        for document in tmp_path.rglob("response.json"):
            assert much not in document.read_text()

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        await talk(house, work)


async def test_an_item_may_be_named_instead_of_sent(open_house, scripts, tmp_path: Path) -> None:
    def work(client: openai.OpenAI) -> None:
        first = create(client)
        reference = {"type": "item_reference", "id": first.output[0].id}
        second = create(client, [reference, {"role": "user", "content": "yes"}])
        told = client.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in told] == [SAID, "yes"]
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, [{"type": "item_reference", "id": "msg_1"}])
        assert caught.value.param == "input[0].id"

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        await talk(house, work)


async def test_nothing_is_kept_of_what_is_not_to_be_kept_or_failed(
    open_house, scripts, tmp_path: Path
) -> None:
    def work(client: openai.OpenAI) -> None:
        unstored = create(client, store=False)
        assert unstored.store is False
        for body in ({"temperature": 9}, {"previous_response_id": unstored.id}):
            with pytest.raises(openai.BadRequestError) as caught:
                create(client, **body)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        await talk(house, work)
    assert not kept(tmp_path, "**/response.json")


async def test_without_a_directory_the_way_to_have_one_is_told(open_house, scripts) -> None:
    async with open_house(scripts.says(SAID)) as house:
        answers = [
            await house.client.post(
                "/v1/responses", json={"input": "a", "previous_response_id": "resp_" + "0" * 28}
            ),
            await house.client.get("/v1/responses/resp_1"),
            await house.client.delete("/v1/responses/resp_1"),
            await house.client.get("/v1/responses/resp_1/input_items"),
        ]

    for answer in answers:
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "route_not_enabled"
        assert "--files-dir" in answer.json()["error"]["message"]


async def test_a_tenant_cannot_reach_the_responses_of_another(
    open_house, scripts, tmp_path: Path
) -> None:
    keys = keys_of(tmp_path, "ann", "bob")

    def steal(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(mine.id)
        with pytest.raises(openai.BadRequestError):
            create(client, previous_response_id=mine.id)
        with pytest.raises(openai.BadRequestError):
            create(client, [{"type": "item_reference", "id": mine.output[0].id}])

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path / "files"), api_keys_file=keys
    ) as house:
        mine = await talk(house, create, "key-ann")
        await talk(house, steal, "key-bob")
        headers = {"authorization": "Bearer key-bob"}
        for hostile in ("%2e%2e", f"..%2f..%2ftenant-ann%2fresponses%2f{mine.id}", "a" * 999):
            answer = await house.client.get(f"/v1/responses/{hostile}", headers=headers)
            assert answer.status_code == 404


async def test_the_oldest_responses_make_room_for_new_ones(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "MAX_RESPONSES", 3)
    monkeypatch.setattr(store, "CHECK_EVERY", 1)

    def work(client: openai.OpenAI) -> list[str]:
        return [create(client).id for _ in range(6)]

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        made = await talk(house, work)
        left = house.gateway.store.of("default").responses.ids()

    assert left == made[:1:-1]  # three, and the one that came after the look


async def test_files_that_fill_the_quota_leave_room_for_no_response_that_must_be_kept(
    open_house, scripts, tmp_path: Path
) -> None:
    def work(client: openai.OpenAI) -> list[Any]:
        client.files.create(file=b"x" * (1 << 20), purpose="batch")
        assert create(client).store is False
        with pytest.raises(openai.APIStatusError) as caught:
            create(client, store=True)
        return [caught.value.status_code, caught.value.code]

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), files_quota_bytes=1 << 20
    ) as house:
        assert await talk(house, work) == [413, "storage_quota_exceeded"]


async def test_responses_stay_if_to_remove_them_makes_no_room(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECK_EVERY", 1)

    def work(client: openai.OpenAI) -> None:
        made = [create(client).id for _ in range(4)]
        responses = house.gateway.store.of("default").responses
        fill(house.gateway.store.of("default"), over_bytes=5 * BLOCK_BYTES)
        for _ in range(3):
            assert create(client).store is False
        assert responses.ids() == made[::-1]

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), files_quota_bytes=1 << 20
    ) as house:
        await talk(house, work)


async def test_no_more_responses_are_removed_than_the_room_takes(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECK_EVERY", 1)

    def work(client: openai.OpenAI) -> None:
        made = [create(client).id for _ in range(4)]
        responses = house.gateway.store.of("default").responses
        fill(house.gateway.store.of("default"), over_bytes=0)
        last = create(client)
        assert last.store is True
        assert responses.ids() == [last.id, *made[:0:-1]]

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), files_quota_bytes=1 << 20
    ) as house:
        await talk(house, work)


def thought(num_chars: int) -> list[dict[str, Any]]:
    """Items that are kept, and are no part of the prompt by the template here."""
    text = {"type": "reasoning_text", "text": "x" * num_chars}
    return [
        {"type": "reasoning", "summary": [], "content": [text]},
        {"role": "user", "content": "a"},
    ]


async def test_a_conversation_is_stored_as_far_as_a_body_may_be_large(
    open_house, scripts, tmp_path: Path
) -> None:
    most = 9000

    def work(client: openai.OpenAI) -> None:
        last = create(client, thought(2500))
        while (found := create(client, thought(2500), previous_response_id=last.id)).store:
            last = found
        num_asked = len(house.workers[0].submits)
        with pytest.raises(openai.APIStatusError) as caught:
            create(client, thought(6000), previous_response_id=last.id, store=True)
        assert (caught.value.status_code, caught.value.code) == (413, "conversation_too_large")
        assert f"--max-body-bytes {most}" in caught.value.message
        assert len(house.workers[0].submits) == num_asked
        sizes = [document.stat().st_size for document in tmp_path.rglob("response.json")]
        assert len(sizes) > 1
        assert max(sizes) <= most

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), max_body_bytes=most
    ) as house:
        await talk(house, work)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_makes_a_response_too_large_is_given_and_not_stored(
    open_house, scripts, tmp_path: Path, stream: bool
) -> None:
    metadata = {f"{n}": "x" * 512 for n in range(16)}  # repeated in the response
    body = {"input": "a", "metadata": metadata, "stream": stream}

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), max_body_bytes=8600
    ) as house:
        given = await house.client.post("/v1/responses", json=body)
        refused = await house.client.post("/v1/responses", json={**body, "store": True})

    assert given.status_code == 200, given.text
    response = events_of(given.text)[-1]["response"] if stream else given.json()
    assert (response["status"], response["store"]) == ("completed", False)
    assert "conversation_too_large" in refused.text
    assert "response.completed" not in refused.text
    assert not kept(tmp_path, "**/response.json")


async def test_too_much_that_is_stored_is_not_read(open_house, scripts, tmp_path: Path) -> None:
    def store_some(client: openai.OpenAI) -> tuple[Any, Any]:
        return create(client, thought(5000)), create(client, thought(1000))

    def work(client: openai.OpenAI) -> None:
        of_large, of_small = (
            {"type": "item_reference", "id": items[0].id}
            for items in (
                large.output,
                client.responses.input_items.list(small.id, order="asc").data,
            )
        )
        for body, param in (
            ({"previous_response_id": large.id}, "previous_response_id"),
            ({"given": [of_large]}, "input[0].id"),
            ({"given": [of_small] * 5}, "input[3].id"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                create(client, **body)
            assert (caught.value.param, caught.value.code) == (param, "conversation_too_large")
            assert "--max-body-bytes 4000" in caught.value.message
        assert create(client, previous_response_id=small.id)
        assert client.responses.retrieve(large.id) == large

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        large, small = await talk(house, store_some)
    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), max_body_bytes=4000
    ) as house:
        await talk(house, work)


async def test_the_bytes_of_each_response_count_before_the_next_look(
    open_house, scripts, tmp_path: Path
) -> None:
    quota_bytes = 1 << 20

    def work(client: openai.OpenAI) -> None:
        for _ in range(12):
            last = create(client, thought(quota_bytes // 8))
            assert used_bytes(tmp_path / "tenant-default") <= quota_bytes
            assert client.responses.retrieve(last.id) == last

    async with open_house(
        scripts.says(SAID), files_dir=str(tmp_path), files_quota_bytes=quota_bytes
    ) as house:
        await talk(house, work)


def fill(shelf: Shelf, over_bytes: int) -> None:
    """Keep a file that leaves no room, whatever way it got there: so many bytes too large."""
    with shelf.new_file(new_id("file-")) as directory:
        (directory / "content").write_bytes(b"x" * (shelf.room_bytes() + over_bytes))


async def test_old_and_unfinished_responses_are_swept_away(
    open_house, scripts, tmp_path: Path
) -> None:
    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        response = await talk(house, create)
        own = house.gateway.store
    stored = own.of("default").responses
    own.sweep()
    assert stored.ids() == [response.id]

    Store(tmp_path, 1 << 20, keep_s=0.0).sweep()

    assert stored.ids() == []


async def test_a_damaged_response_is_as_good_as_gone(open_house, scripts, tmp_path: Path) -> None:
    def work(client: openai.OpenAI) -> None:
        response = create(client)
        [document] = tmp_path.rglob("response.json")
        document.write_bytes(b'{"response": {')
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        await talk(house, work)


async def test_a_disk_that_fails_ends_a_stream_with_an_error(
    open_house, scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ResponseShelf, "add", full)
    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        whole = await house.client.post("/v1/responses", json={"input": "a"})
        streamed = await house.client.post("/v1/responses", json={"input": "a", "stream": True})

    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "storage_unavailable")
    assert "event: response.failed" in streamed.text
    assert "event: response.completed" not in streamed.text


async def test_a_batch_may_have_responses(open_house, scripts, tmp_path: Path) -> None:
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "a"}}\n'

    def work(client: openai.OpenAI) -> Any:
        batch = ended(client, submit(client, line, "/v1/responses"))
        [told] = lines_of(client, batch.output_file_id)
        return told["response"]["body"]

    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        body = await talk(house, work)

    assert (body["object"], body["status"], body["store"]) == ("response", "completed", True)


async def test_a_stored_response_is_not_streamed_again(open_house, scripts, tmp_path: Path) -> None:
    async with open_house(scripts.says(SAID), files_dir=str(tmp_path)) as house:
        response = await talk(house, create)
        refused = await house.client.get(f"/v1/responses/{response.id}?stream=true")
        after = await house.client.get(f"/v1/responses/{response.id}/input_items?after=x")

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert (after.status_code, after.json()["error"]["param"]) == (400, "after")
