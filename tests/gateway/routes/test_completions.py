import asyncio
import json

import httpx
import pytest

from moesaic.services.gateway.generate import deliver
from moesaic.v1 import attention_pb2 as pb


def events_of(text: str) -> list[object]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


async def test_a_chat_is_answered_with_usage_and_epochs(open_house, scripts) -> None:
    async with open_house(scripts.says("hello world")) as house:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "moesaic": {"provenance": True},
        }

        response = await house.client.post("/v1/chat/completions", json=body)

    answer = response.json()
    assert response.status_code == 200, answer
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "hello world"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    tokens = len(scripts.ids("hello world"))
    assert answer["usage"]["completion_tokens"] == tokens + 1
    assert answer["moesaic"] == {
        "epochs": [{"epoch": 3, "tokens": tokens}],
        "cached_tokens": 0,
        "quality": {"mean_threshold": 1.0, "degraded_share": 0.0},
        "workers": ["attention-1"],
    }
    assert response.headers["x-request-id"].startswith("req-")


async def test_the_prompt_is_the_rendered_chat_and_fills_the_context(
    open_house, scripts, language
) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
            ]
        }
        await house.client.post("/v1/chat/completions", json=body)
        [submit] = house.workers[0].submits

    rendered = (
        "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(submit.token_ids) == scripts.ids(rendered)
    assert submit.generation.max_tokens == language.max_tokens - len(submit.token_ids)
    assert submit.generation.sampling.temperature == 1.0
    assert not submit.generation.HasField("top_logprobs")


async def test_a_stream_opens_with_the_role_and_ends_with_reason_usage_and_done(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("this is a story")) as house:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = await house.client.post("/v1/chat/completions", json=body)

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events_of(response.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "this is a story"
    *_, finish, usage = chunks
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["choices"][0]["delta"] == {}
    assert finish["moesaic"]["epochs"][0]["epoch"] == 3
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(scripts.ids("this is a story")) + 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_continuous_usage_stands_on_every_chunk(open_house, scripts) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with open_house(scripts.says("this is a story")) as house:
        body = {"prompt": "hello", "stream": True, "stream_options": options, "stop": None}
        response = await house.client.post("/v1/completions", json=body)

    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in events_of(response.text))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_cancels_the_work(
    open_house, scripts, stream: bool
) -> None:
    async with open_house(scripts.says("this is a story about a house", gap_s=0.01)) as house:
        body = {"prompt": "hello", "max_tokens": 100, "stop": ["story ab"], "stream": stream}
        response = await house.client.post("/v1/completions", json=body)
        cancel = await house.workers[0].cancels.get()
        [submit] = house.workers[0].submits

    answers = events_of(response.text) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == "this is a "
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "story ab"
    assert answers[-1]["moesaic"] == {"cached_tokens": 0}  # no epochs: the worker had no last word
    assert cancel.request_id == submit.request_id


async def test_quality_is_told_of_all_choices_or_not_at_all(open_house, scripts) -> None:
    async with open_house(scripts.says("this is a story about a house", gap_s=0.01)) as house:
        body = {"prompt": ["hello", "story"], "max_tokens": 100, "stop": ["story ab"]}
        cut = (await house.client.post("/v1/completions", json=body)).json()
        whole = (await house.client.post("/v1/completions", json={**body, "stop": None})).json()

    assert "quality" not in cut["moesaic"]
    assert whole["moesaic"]["quality"] == {"mean_threshold": 1.0, "degraded_share": 0.0}


async def test_prompts_and_choices_come_back_in_order(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"prompt": ["hello", "world"], "n": 2, "max_tokens": 5, "seed": 7, "echo": True}
        answer = (await house.client.post("/v1/completions", json=body)).json()
        seeds = [submit.generation.sampling.seed for submit in house.workers[0].submits]

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["helloyes"] * 2 + ["worldyes"] * 2
    assert seeds == [7, 8, 7, 8]
    assert answer["usage"]["prompt_tokens"] == len(scripts.ids("hello")) + len(scripts.ids("world"))


async def test_without_a_seed_each_answer_is_a_draw_of_its_own(open_house, scripts) -> None:
    completion = {"prompt": ["hello"] * 8, "n": 2, "max_tokens": 5}
    chat = {"messages": [{"role": "user", "content": "hello"}], "n": 4, "max_tokens": 5}
    async with open_house(scripts.says("yes")) as house:
        await asyncio.gather(
            *(house.client.post("/v1/completions", json=completion) for _ in range(3)),
            *(house.client.post("/v1/chat/completions", json=chat) for _ in range(3)),
        )
        seeds = [submit.generation.sampling.seed for submit in house.workers[0].submits]

    assert len(seeds) == len(set(seeds)) == 3 * 8 * 2 + 3 * 4


@pytest.mark.parametrize("seed", [0, (1 << 63) - 1])
async def test_every_seed_gives_reproducible_answers(open_house, scripts, seed: int) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"prompt": ["hello"] * 3, "max_tokens": 5, "seed": seed}
        await house.client.post("/v1/completions", json=body)
        seeds = [submit.generation.sampling.seed for submit in house.workers[0].submits]

    assert seeds == [seed] * 3


async def test_many_prompts_are_given_to_workers_a_window_at_a_time(open_house, scripts) -> None:
    async with open_house(scripts.says("yes"), scripts.says("yes")) as house:
        body = {"prompt": [[5, 6]] * 300, "max_tokens": 5}
        answer = (await house.client.post("/v1/completions", json=body)).json()

    assert len(answer["choices"]) == 300
    assert all(choice["text"] == "yes" for choice in answer["choices"])
    assert all(worker.submits for worker in house.workers)


async def test_default_and_explicit_limits_reach_the_worker(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        await house.client.post("/v1/completions", json={"prompt": [5, 6, 7]})
        fields = {
            "max_tokens": 9,
            "min_tokens": 2,
            "top_k": -1,
            "top_p": 0.5,
            "ignore_eos": True,
            "temperature": 0,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {"7": -100, "8": 2.5},
        }
        await house.client.post(
            "/v1/completions", json={"prompt": [5, 6, 7], "logprobs": 2, **fields}
        )
        first, second = (submit.generation for submit in house.workers[0].submits)

    assert first.max_tokens == 16
    assert (second.max_tokens, second.min_tokens, second.ignore_eos) == (9, 2, True)
    assert (second.sampling.temperature, second.sampling.top_p, second.sampling.top_k) == (
        0,
        0.5,
        0,
    )
    assert second.top_logprobs == 2
    penalties = pb.Sampling(repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(second.sampling, name) == getattr(penalties, name)
        assert getattr(first.sampling, name) == (1 if name == "repetition_penalty" else 0)
    assert dict(second.sampling.logit_bias) == {7: -100, 8: 2.5}


async def test_logprobs_come_in_the_shape_of_the_route(open_house, scripts) -> None:
    [token_id, other] = [scripts.ids("yes")[0], scripts.ids("no")[0]]

    async def script(submit, emit) -> None:
        entry = pb.TokenLogprob(logprob=-2.0, top_token_ids=[other], top_logprobs=[float("-inf")])
        emit(tokens=pb.Tokens(token_index=0, token_ids=[token_id], logprobs=[entry]))
        emit(finished=scripts.finished(submit, 1))

    async with open_house(script) as house:
        plain = await house.client.post("/v1/completions", json={"prompt": "a", "logprobs": 1})
        chat = await house.client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "a"}],
                "logprobs": True,
                "top_logprobs": 1,
            },
        )

    text, other_text = scripts.text(token_id), scripts.text(other)
    end = "<|im_end|>"
    assert plain.json()["choices"][0]["logprobs"] == {
        "text_offset": [0, len(text)],
        "token_logprobs": [-2.0, -0.25],
        "tokens": [text, end],
        "top_logprobs": [{other_text: -9999.0, text: -2.0}, {end: -0.25}],
    }
    [entry, ending] = chat.json()["choices"][0]["logprobs"]["content"]
    assert (ending["token"], ending["logprob"]) == (end, -0.25)
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (text, -2.0, list(text.encode()))
    assert entry["top_logprobs"][0]["token"] == other_text


async def test_token_ids_are_returned_when_asked_for(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:
        body = {"prompt": [5, 6], "return_token_ids": True, "stream": True}
        chunks = events_of((await house.client.post("/v1/completions", json=body)).text)

    assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert ids == [*scripts.ids("yes"), *scripts.language.config.eos_token_ids]


async def test_line_separators_are_escaped_in_streams(open_house, scripts) -> None:
    async with open_house(scripts.says("a\u2028b\u2029c\x85d")) as house:
        response = await house.client.post(
            "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 50}
        )

    assert not {"\u2028", "\u2029", "\x85"} & set(response.text)
    assert (
        "".join(c["choices"][0]["text"] for c in events_of(response.text)) == "a\u2028b\u2029c\x85d"
    )


async def test_silence_is_filled_with_comments(open_house, scripts, monkeypatch) -> None:
    monkeypatch.setattr(deliver, "KEEP_ALIVE_S", 0.05)
    async with open_house(scripts.says("yes no", gap_s=0.3)) as house:
        response = await house.client.post("/v1/completions", json={"prompt": "a", "stream": True})

    assert ": keep-alive\n\n" in response.text
    assert "".join(c["choices"][0]["text"] for c in events_of(response.text)) == "yes no"


async def test_request_ids_are_adopted_or_replaced(open_house, scripts) -> None:
    async with open_house(scripts.says("yes")) as house:

        async def sent(given: str) -> httpx.Response:
            return await house.client.get("/v1/models", headers={"x-request-id": given})

        assert (await sent("abc-1.2_3")).headers["x-request-id"] == "abc-1.2_3"
        assert (await sent("with space")).headers["x-request-id"].startswith("req-")


async def test_words_to_avoid_are_sent_as_the_tokens_that_make_them(open_house, scripts) -> None:
    body = {"prompt": "hello", "bad_words": ["music", "no"], "allowed_token_ids": [7, 9], "n": 2}
    async with open_house(scripts.says("yes")) as house:
        response = await house.client.post("/v1/completions", json={**body, "best_of": 2})
        sampling = house.workers[0].submits[0].generation.sampling

    assert response.status_code == 200, response.text
    ways = ["music", " music", "no", " no"]
    assert [list(word.token_ids) for word in sampling.bad_words] == [scripts.ids(w) for w in ways]
    assert list(sampling.allowed_token_ids) == [7, 9]
