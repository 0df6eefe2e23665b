"""Compressed bodies are read as what was compressed, and a small body never becomes a large one."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.types import Message

from moesaic.errors import InvalidInput
from moesaic.services.gateway.http import receiving
from moesaic.services.gateway.http.receiving import PIECE_BYTES, Inflated

BODY = b'{"prompt": "yes"}'
JSON = {"content-type": "application/json"}
WAYS = {"gzip": gzip.compress, "deflate": zlib.compress}
MOST = 1 << 16


async def read(inflated: Inflated) -> bytes:
    """All of a body, and the number of pieces is what its end says."""
    content, more = b"", True
    while more:
        message = await inflated()
        assert len(message["body"]) <= PIECE_BYTES
        content += message["body"]
        more = message["more_body"]
    return content


def inflated(sent: list[bytes], coding: str, most: int) -> Inflated:
    left: Iterator[Message] = iter(
        {"type": "http.request", "body": part, "more_body": i + 1 < len(sent)}
        for i, part in enumerate(sent)
    )

    async def receive() -> Message:
        return next(left)

    return Inflated(receive, coding, most)


@given(st.binary(max_size=300), st.integers(1, 400), st.integers(1, 50), st.sampled_from([*WAYS]))
async def test_a_body_comes_out_as_it_went_in_however_it_is_split(
    content: bytes, times: int, step: int, coding: str
) -> None:
    whole = content * times
    packed = WAYS[coding](whole)
    sent = [packed[at : at + step] for at in range(0, len(packed), step)]

    assert await read(inflated(sent, coding, len(whole))) == whole
    assert await read(inflated([*sent, b""], coding, len(whole))) == whole
    if whole:
        with pytest.raises(HTTPException) as refused:
            await read(inflated(sent, coding, len(whole) - 1))
        assert refused.value.status_code == 413


async def test_no_more_of_a_bomb_is_inflated_than_a_body_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb, made, real = gzip.compress(bytes(64 << 20)), [], zlib.decompressobj

    class Counted:
        def __init__(self, wbits: int) -> None:
            self.real = real(wbits)

        def decompress(self, data: bytes, most: int) -> bytes:
            made.append(self.real.decompress(data, most))
            return made[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(receiving.zlib, "decompressobj", Counted)
    with pytest.raises(HTTPException):
        await read(inflated([bomb], "gzip", MOST))

    assert sum(map(len, made)) <= MOST + PIECE_BYTES


@pytest.mark.parametrize(
    ("packed", "coding", "words"),
    [
        (b"", "gzip", "ends before"),
        (gzip.compress(BODY)[:-1], "gzip", "ends before"),
        (gzip.compress(BODY) + b"a", "gzip", "goes on behind"),
        (gzip.compress(BODY) * 2, "gzip", "goes on behind"),
        (gzip.compress(BODY)[:-8] + bytes(8), "gzip", "not valid gzip"),
        (BODY, "gzip", "not valid gzip"),
        (zlib.compress(BODY), "gzip", "not valid gzip"),
        (gzip.compress(BODY), "deflate", "not valid deflate"),
    ],
)
async def test_a_damaged_body_is_refused(packed: bytes, coding: str, words: str) -> None:
    for step in (1, 1000):
        sent = [packed[at : at + step] for at in range(0, len(packed), step)] or [b""]
        with pytest.raises(InvalidInput, match=words):
            await read(inflated(sent, coding, MOST))


async def test_the_gateway_answers_compressed_bodies_and_refuses_bombs_by_their_size(
    open_house: Any, scripts: Any
) -> None:
    text = json.dumps({"prompt": "yes", "user": "a" * 2 * MOST}).encode()
    async with open_house(scripts.says("yes"), max_body_bytes=MOST) as house:

        async def ask(body: bytes, coding: str, **headers: str) -> Any:
            told = {**JSON, "content-encoding": coding, **headers}
            return await house.client.post("/v1/completions", content=body, headers=told)

        for coding in ("gzip", "GZip", "gzip, identity", "identity, deflate", "identity"):
            name = coding.lower().replace("identity", "").strip(", ")
            answer = await ask(WAYS.get(name, bytes)(BODY), coding)
            assert answer.status_code == 200, answer.text
        bombs = [await ask(way(text), name) for name, way in WAYS.items()]
        broken = await ask(BODY, "gzip")
        empty = await ask(b"", "gzip")
        plain = await ask(BODY, "")

    assert [bomb.status_code for bomb in bombs] == [413, 413]
    assert {bomb.json()["error"]["code"] for bomb in bombs} == {"request_too_large"}
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "body")
    assert (empty.status_code, plain.status_code) == (400, 200)
    assert len(gzip.compress(text)) < MOST


async def test_an_uploaded_form_may_be_compressed(
    open_house: Any, scripts: Any, tmp_path: Any
) -> None:
    content = b'{"custom_id": "a"}\n' * 5000
    async with open_house(scripts.silent, files_dir=str(tmp_path)) as house:
        form = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
        plain = house.client.build_request("POST", "/v1/files", **form)
        headers = {"content-type": plain.headers["content-type"], "content-encoding": "gzip"}
        packed = gzip.compress(plain.read())
        kept = await house.client.post("/v1/files", content=packed, headers=headers)
        told = await house.client.get(f"/v1/files/{kept.json()['id']}/content")

    assert (kept.status_code, told.content) == (200, content)
