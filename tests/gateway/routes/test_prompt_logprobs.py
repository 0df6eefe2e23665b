"""What is told of a prompt's own tokens: ``echo`` with ``logprobs``, and ``prompt_logprobs``."""

import asyncio
import json
from typing import Any

import pytest

from moesaic.v1 import attention_pb2 as pb


def entry(token_id: int) -> pb.TokenLogprob:
    return pb.TokenLogprob(logprob=-token_id / 8, rank=2, top_token_ids=[9], top_logprobs=[-0.25])


@pytest.fixture
def describes(scripts) -> Any:
    """A worker that describes the prompt two tokens at a time, and answers ``yes`` if it may."""

    async def script(submit: pb.Submit, emit) -> None:
        if submit.generation.HasField("prompt_logprobs"):
            for first in range(1, len(submit.token_ids), 2):
                told = [entry(token_id) for token_id in submit.token_ids[first : first + 2]]
                emit(prompt_logprobs=pb.PromptLogprobs(first_position=first, logprobs=told))
        said = scripts.ids("yes")[: submit.generation.max_tokens]
        asked = submit.generation.HasField("top_logprobs")
        for index, token_id in enumerate(said):
            told = [entry(token_id)] if asked else []
            emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id], logprobs=told))
        emit(finished=scripts.finished(submit, len(said), stop=False))

    return script


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echoed_tokens_have_log_probabilities_from_the_second_on(
    open_house, scripts, describes, max_tokens, stream
) -> None:
    prompts = [scripts.ids("hello world"), scripts.ids("a story")]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    async with open_house(describes) as house:
        response = await house.client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 200, response.text
    if stream:
        blocks = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
        chunks = [json.loads(block) for block in blocks if block.startswith("{")]
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        choices = response.json()["choices"]

    for index, prompt in enumerate(prompts):
        mine = [choice for choice in choices if choice["index"] == index]
        said = scripts.ids("yes")[:max_tokens]
        texts = [scripts.text(token_id) for token_id in [*prompt, *said]]
        told = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        assert "".join(choice["text"] for choice in mine) == "".join(texts)
        assert [text for part in told for text in part["tokens"]] == texts
        logprobs = [value for part in told for value in part["token_logprobs"]]
        assert logprobs == [None, *(-token_id / 8 for token_id in [*prompt[1:], *said])]
        offsets = [offset for part in told for offset in part["text_offset"]]
        assert offsets == [len("".join(texts[:i])) for i in range(len(texts))]
        top = [value for part in told for value in part["top_logprobs"]]
        assert top[0] is None
        assert top[1][texts[1]] == logprobs[1]
        assert mine[-1]["finish_reason"] == "length"


async def test_prompt_logprobs_come_in_the_shape_of_vllm(open_house, scripts, describes) -> None:
    ids = scripts.ids("hello world")
    async with open_house(describes) as house:
        body = {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 0}
        plain = await house.client.post("/v1/completions", json=body)
        messages = [{"role": "user", "content": "hello"}]
        body = {"messages": messages, "prompt_logprobs": 0, "max_tokens": 1}
        chat = await house.client.post("/v1/chat/completions", json=body)
        [first, second] = house.workers[0].submits

    text_of = scripts.text
    assert plain.json()["choices"][0]["prompt_logprobs"] == [
        None,
        *(
            {
                "9": {"logprob": -0.25, "rank": 1, "decoded_token": text_of(9)},
                str(i): {"logprob": -i / 8, "rank": 2, "decoded_token": text_of(i)},
            }
            for i in ids[1:]
        ),
    ]
    assert plain.json()["usage"]["completion_tokens"] == 0
    assert len(chat.json()["prompt_logprobs"]) == len(second.token_ids)
    assert (first.generation.prompt_logprobs, first.generation.max_tokens) == (1, 0)


@pytest.mark.parametrize("told", [0, 2])
@pytest.mark.parametrize("said", [0, 1])
async def test_a_described_prompt_survives_the_loss_of_its_worker(
    open_house, scripts, describes, told, said
) -> None:
    prompt = scripts.ids("hello world this is")
    told = len(prompt) - 1 if said else told
    dying = asyncio.Event()

    async def script(submit: pb.Submit, emit) -> None:
        known = [entry(token_id) for token_id in prompt[1 : told + 1]]
        emit(prompt_logprobs=pb.PromptLogprobs(first_position=1, logprobs=known))
        for index, token_id in enumerate(scripts.ids("yes")[:said]):
            emit(
                tokens=pb.Tokens(
                    token_index=index, token_ids=[token_id], logprobs=[entry(token_id)]
                )
            )
        dying.set()

    async with open_house(script, describes) as house:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1 + said}
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=body))
        await dying.wait()
        await house.heard(house.workers[0])
        await house.workers[0].kill()
        [choice] = (await asking).json()["choices"]
        [after] = house.workers[1].submits

    assert choice["logprobs"]["token_logprobs"][: len(prompt)] == [
        None,
        *(-i / 8 for i in prompt[1:]),
    ]
    assert after.generation.HasField("prompt_logprobs") == (not said)


async def test_two_ways_to_tell_of_a_prompt_keep_their_own_numbers(
    open_house, scripts, describes
) -> None:
    async with open_house(describes) as house:
        body = {"prompt": [5, 6], "echo": True, "logprobs": 1, "prompt_logprobs": 0}
        response = await house.client.post("/v1/completions", json={**body, "max_tokens": 0})
        [submit] = house.workers[0].submits

    [choice] = response.json()["choices"]
    assert submit.generation.prompt_logprobs == 1
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert list(choice["prompt_logprobs"][1]) == ["6"]


async def test_max_tokens_0_needs_an_interest_in_the_prompt(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        bare = await house.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
        body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
        streamed = await house.client.post("/v1/completions", json=body)

    assert (bare.status_code, streamed.status_code) == (400, 400)
    assert "echo or prompt_logprobs" in bare.json()["error"]["message"]
    assert "stream" in streamed.json()["error"]["message"]
