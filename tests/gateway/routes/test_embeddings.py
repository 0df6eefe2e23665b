"""``/v1/embeddings`` and ``/pooling``: texts in, vectors out."""

import asyncio
import base64
import json
import math
from typing import Any

import numpy as np
import openai
import pytest

from moesaic.services.gateway.language import Language
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.conftest import CONFIG, MAX_POSITIONS

SIZE: Any = CONFIG["hidden_size"]
ONE = [float(i + 1) for i in range(SIZE)]
TWO = [(-1.0) ** i for i in range(SIZE)]


def unit(vector: list[float]) -> Any:
    return pytest.approx([value / math.hypot(*vector) for value in vector], rel=1e-6)


@pytest.mark.parametrize("asks", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_the_openai_client_reads_vectors(open_house, scripts, asks: Any) -> None:
    def embed() -> Any:
        with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none") as client:
            return client.embeddings.create(model="tiny", input=["hello", "world "], **asks)

    async with open_house(scripts.pools(ONE, TWO)) as house:
        told = await asyncio.to_thread(embed)
        submits = house.workers[0].submits

    assert (told.object, told.model) == ("list", "tiny")
    assert [(item.object, item.index) for item in told.data] == [("embedding", 0), ("embedding", 1)]
    vectors = [item.embedding for item in told.data]
    if asks.get("encoding_format") == "base64":
        vectors = [np.frombuffer(base64.b64decode(v), "<f4").tolist() for v in vectors]
    assert vectors == [unit(ONE), unit(TWO)]
    count = len(scripts.ids("hello")) + len(scripts.ids("world "))
    assert told.usage.prompt_tokens == told.usage.total_tokens == count
    assert [list(s.token_ids) for s in submits] == [scripts.ids("hello"), scripts.ids("world ")]
    assert {s.embedding.pooling for s in submits} == {pb.POOLING_LAST}


async def test_every_form_of_input_reaches_workers_as_tokens(open_house, scripts) -> None:
    ids = scripts.ids("hello")
    forms = ("hello", ["hello"], ids, [ids])
    async with open_house(scripts.pools(*[ONE] * 4)) as house:
        for form in forms:
            body = {"input": form, "moesaic": {"pooling": "mean"}, "user": "me", "priority": 3}
            answer = await house.client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        submits = house.workers[0].submits

    assert all(list(submit.token_ids) == ids for submit in submits)
    told = {(submit.embedding.pooling, submit.priority) for submit in submits}
    assert (len(submits), told) == (4, {(pb.POOLING_MEAN, 3)})


async def test_pooling_answers_as_vllm_does(open_house, scripts) -> None:
    body = {"model": "tiny", "input": "hello", "task": "embed", "use_activation": False}
    async with open_house(scripts.pools(ONE)) as house:
        answer = (await house.client.post("/pooling", json=body)).json()

    assert answer["data"] == [{"object": "pooling", "index": 0, "data": ONE}]
    assert (answer["object"], answer["id"][:5]) == ("list", "pool-")


async def test_messages_become_one_prompt_by_the_chat_template(open_house, scripts) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "normalize": False}
    async with open_house(scripts.pools(ONE, ONE)) as house:
        for more in ({}, {"add_generation_prompt": True}):
            answer = await house.client.post("/v1/embeddings", json={**body, **more})
            assert answer.json()["data"][0]["embedding"] == ONE
        decode = house.gateway.language.tokenizer.decode
        told = [
            decode(list(s.token_ids), skip_special_tokens=False) for s in house.workers[0].submits
        ]

    written = "<|im_start|>user\nhello<|im_end|>\n"
    assert told == [written, f"{written}<|im_start|>assistant\n"]


async def test_long_inputs_lose_their_beginning_where_that_is_asked_for(
    open_house, scripts
) -> None:
    long = [5] * MAX_POSITIONS + [7, 8]
    async with open_house(scripts.pools(ONE, ONE)) as house:
        for kept in (2, -1):
            body = {"input": long, "truncate_prompt_tokens": kept}
            assert (await house.client.post("/v1/embeddings", json=body)).status_code == 200
        few, most = (list(submit.token_ids) for submit in house.workers[0].submits)

    assert few == [7, 8]
    assert most == long[-MAX_POSITIONS:]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "body", "either input or messages"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "1 to 2048"),
        ({"input": [[]]}, "input", "not empty"),
        ({"input": ["hello", ""]}, "input", "number 1"),
        ({"input": [1, "hello"]}, "input", "list of strings"),
        ({"input": [True]}, "input", "list of strings"),
        ({"input": {"text": "hello"}}, "input", "list of strings"),
        ({"input": ["hello"] * 2049}, "input", "2048"),
        ({"input": [1, 1_000_000]}, "input", "token ids must be in"),
        ({"input": [[1], [-1]]}, "input[1]", "token ids must be in"),
        ({"input": ["hello", "story " * MAX_POSITIONS * 2]}, "input[1]", "context"),
        ({"input": [[1], [1] * (MAX_POSITIONS + 1)]}, "input[1]", "context"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "base64"),
        ({"input": "a", "dimensions": SIZE - 1}, "dimensions", f"{SIZE} numbers"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "endianness": "big"}, "endianness", "little"),
        ({"input": "a", "moesaic": {"pooling": "cls"}}, "moesaic.pooling", "mean"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "body", "either"),
        ({"messages": []}, "messages", "1"),
        ({"input": "a", "model": "another"}, "model", "another"),
    ],
)
async def test_a_bad_body_is_refused_with_its_field(
    open_house, scripts, path: str, body: Any, field: str, words: str
) -> None:
    async with open_house(scripts.pools()) as house:
        answer = await house.client.post(path, json=body)
        assert not house.workers[0].submits

    error = answer.json()["error"]
    assert answer.status_code in (400, 404), answer.text
    assert error["param"] == field
    assert words in error["message"]


async def test_vectors_of_each_token_are_refused_by_name(open_house, scripts) -> None:
    async with open_house(scripts.pools()) as house:
        body = {"input": "a", "task": "token_embed"}
        error = (await house.client.post("/pooling", json=body)).json()["error"]

    assert error["param"] == "task"
    assert "embed" in error["message"]


@pytest.mark.parametrize("vector", [[], ONE[1:], [math.nan, *ONE[1:]], [math.inf, *ONE[1:]]])
async def test_a_workers_wrong_vector_is_no_answer(open_house, scripts, vector: Any) -> None:
    async with open_house(scripts.pools(vector)) as house:
        answer = await house.client.post("/v1/embeddings", json={"input": "hello"})

    assert answer.status_code == 500
    assert f"expected {SIZE} numbers" in answer.text


async def test_a_client_that_leaves_cancels_its_inputs(open_house, scripts) -> None:
    async with open_house(scripts.silent) as house:
        body = {"input": ["hello", "world"]}
        asking = asyncio.ensure_future(house.client.post("/v1/embeddings", json=body))
        worker = house.workers[0]
        await house.until(lambda: len(worker.submits) == 2)
        asking.cancel()

        cancelled = {(await worker.cancels.get()).request_id for _ in body["input"]}
        assert cancelled == {submit.request_id for submit in worker.submits}


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({"is_matryoshka": True}, (1, 5, SIZE), (SIZE + 1,)),
        ({"matryoshka_dimensions": [4, 8]}, (4, 8, SIZE), (5,)),
    ],
)
async def test_a_model_that_says_so_has_shorter_vectors(
    open_house, scripts, model_directory, tmp_path, fields: Any, allowed: Any, refused: Any
) -> None:
    for path in model_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    async with open_house(scripts.pools(*[ONE] * len(allowed))) as house:
        house.gateway.language.dimensions, kept = (
            Language(tmp_path).dimensions,
            house.gateway.language.dimensions,
        )
        try:
            for size in allowed:
                body = {"input": "a", "dimensions": size}
                told = (await house.client.post("/v1/embeddings", json=body)).json()
                assert told["data"][0]["embedding"] == unit(ONE[:size])
            for size in refused:
                body = {"input": "a", "dimensions": size}
                answer = await house.client.post("/v1/embeddings", json=body)
                assert answer.json()["error"]["param"] == "dimensions"
        finally:
            house.gateway.language.dimensions = kept
