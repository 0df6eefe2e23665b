"""The ``openai`` client against a real suite: answers, streams, errors, retries, timeouts, cancelling."""

import asyncio
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.suites import Suite
from tests.waiting import HANG_S, eventually

MESSAGES = [{"role": "user", "content": "Continue this text. The old prince came into the room"}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 16}
LONG: dict[str, Any] = {"model": "demo", "prompt": "Once", "max_tokens": 1900}


@pytest.fixture
def client(suite: Suite) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="none") as client:
        yield client


def metric(suite: Suite, pattern: str) -> float:
    """The sum of the gateway's series that match."""
    lines = httpx.get(f"{suite.url}/metrics", timeout=HANG_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))


def num_cancelled(suite: Suite) -> float:
    return metric(suite, r'moesaic_requests_total\{.*outcome="cancelled"')


def num_refused(suite: Suite) -> float:
    return metric(suite, r'moesaic_requests_total\{.*status="503"')


def test_the_model_is_listed_and_found_by_name(client: openai.OpenAI) -> None:
    [model] = client.models.list().data

    assert client.models.retrieve(model.id) == model


def test_a_stream_brings_what_a_whole_answer_has(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(c.delta.content or "" for c in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_the_asynchronous_client_gets_the_same_answers(
    suite: Suite, client: openai.OpenAI
) -> None:
    prompts = [f"The {number}th man went to" for number in range(8)]
    expected = client.completions.create(prompt=prompts, **GREEDY).choices

    async with openai.AsyncOpenAI(base_url=f"{suite.url}/v1", api_key="none") as caller:

        async def said(prompt: str) -> str:
            stream = await caller.completions.create(prompt=prompt, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

        texts = await asyncio.gather(*map(said, prompts))

    assert texts == [choice.text for choice in expected]


def test_log_probabilities_of_answer_and_prompt_are_read(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    echoed = client.completions.create(prompt="a story", echo=True, logprobs=1, **GREEDY)

    for token in chat.choices[0].logprobs.content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # greedy
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    assert "".join(echoed.choices[0].logprobs.tokens) == echoed.choices[0].text


def test_decisions_are_read_in_the_order_of_their_questions(client: openai.OpenAI) -> None:
    levels = [{"label": "low"}, {"label": "high"}]
    decision = client.decisions.create(
        model="demo",
        input=[{"role": "user", "content": "my card was declined at the petrol station"}],
        questions=[
            {"type": "predicate", "instructions": "A card did not work.", "name": "card"},
            {
                "type": "choice",
                "instructions": "So?",
                "choices": [{"value": True}, {"value": False}],
            },
            {"type": "score", "instructions": "How urgent is it?", "levels": levels},
        ],
    )

    predicate, choice, score = decision.answers
    assert (predicate.type, choice.type, score.type) == ("predicate", "choice", "score")
    assert predicate.name == "card"
    assert 0 <= predicate.probability <= 1
    assert isinstance(choice.choice, bool)
    assert sum(entry.probability for entry in choice.probabilities) == pytest.approx(1)
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert decision.usage.input_tokens_details.cached_tokens <= decision.usage.input_tokens


@pytest.mark.parametrize(
    ("error", "code", "param", "call"),
    [
        (openai.BadRequestError, "invalid_request", "temperature", {"temperature": 9}),
        (openai.BadRequestError, "context_length_exceeded", "max_tokens", {"max_tokens": 5000}),
        (openai.NotFoundError, "model_not_found", "model", {"model": "gpt"}),
        (openai.BadRequestError, "unsupported_parameter", "suffix", {"suffix": "x"}),
    ],
)
def test_errors_have_the_class_and_the_code(
    client: openai.OpenAI, error: type[openai.APIStatusError], code: str, param: str, call: Any
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(prompt="a", **{**GREEDY, **call})

    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id


def test_an_unknown_route_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="demo", prompt="a")

    assert caught.value.code == "not_found"


def test_vectors_are_the_same_as_floats_and_as_bytes(client: openai.OpenAI) -> None:
    # The client asks for bytes, and reads them itself, where nothing else is said.
    floats = client.embeddings.create(model="demo", input=["a", "b c"], encoding_format="float")
    read = client.embeddings.create(model="demo", input=["a", "b c"])

    assert [item.index for item in read.data] == [0, 1]
    for ours, theirs in zip(floats.data, read.data, strict=True):
        assert theirs.embedding == pytest.approx(ours.embedding, abs=1e-5)
        assert sum(value**2 for value in ours.embedding) == pytest.approx(1, abs=1e-4)
    assert read.usage.prompt_tokens > 0


def test_a_deadline_of_the_callers_ends_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=0).completions.create(
            **LONG, extra_body={"ignore_eos": True, "moesaic": {"deadline_ms": 50}}
        )

    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


def test_the_client_waits_out_a_lost_expert_worker(suite: Suite, client: openai.OpenAI) -> None:
    create = client.with_options(max_retries=100).completions.with_raw_response.create
    before = create(prompt="a story", **GREEDY).parse()
    suite.signal("scheduler", signal.SIGSTOP)  # who would have the experts loaded elsewhere
    try:
        suite.signal("expert-1", signal.SIGKILL)
        eventually(lambda: httpx.get(f"{suite.url}/readyz", timeout=HANG_S).status_code == 503)
        with pytest.raises(openai.InternalServerError) as caught:
            client.with_options(max_retries=0).completions.create(prompt="a story", **GREEDY)
        refused = num_refused(suite)
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(create, prompt="a story", **GREEDY)
            eventually(lambda: num_refused(suite) > refused)
            suite.signal("scheduler", signal.SIGCONT)
            after = asking.result()
    finally:
        suite.signal("scheduler", signal.SIGCONT)
    suite.until_ready()

    assert (caught.value.status_code, caught.value.code) == (503, "expert_unavailable")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert after.retries_taken >= 1
    assert after.parse().choices[0].text == before.choices[0].text


def test_a_client_that_times_out_leaves_no_work_behind(suite: Suite, client: openai.OpenAI) -> None:
    cancelled = num_cancelled(suite)

    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3, max_retries=0).completions.create(
            **LONG, extra_body={"ignore_eos": True}
        )

    eventually(lambda: num_cancelled(suite) == cancelled + 1)


def test_a_stream_that_is_closed_early_is_cancelled(suite: Suite, client: openai.OpenAI) -> None:
    cancelled = num_cancelled(suite)

    with client.completions.create(**LONG, stream=True, extra_body={"ignore_eos": True}) as stream:
        assert next(stream).choices

    eventually(lambda: num_cancelled(suite) == cancelled + 1)
    eventually(lambda: metric(suite, r"moesaic_requests_inflight ") == 1)  # the one that asks
