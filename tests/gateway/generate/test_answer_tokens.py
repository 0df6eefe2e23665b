"""Every token of an answer is told, the end token too: as many ids and log-probabilities as are counted."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.models.text.tokenizer import StreamDecoder
from moesaic.services.gateway.generate.answers import Ending, GrowingChoice, joined
from moesaic.services.gateway.language import Language
from moesaic.v1 import attention_pb2 as pb

TEXTS = st.text(alphabet="yes nomuic\u20ac", max_size=24)
ENDS = st.sampled_from(["length", "eos", "stop_token"])


def fed(
    choice: GrowingChoice, ids: Sequence[int], cuts: Sequence[int], finished: pb.Finished
) -> Any:
    """What a choice shows of tokens that come in these parts, and of its end."""
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = []
    for a, b in itertools.pairwise(bounds):
        told = [pb.TokenLogprob(logprob=-token_id) for token_id in ids[a:b]]
        if not choice.finished:
            pieces.append(choice.feed(pb.Tokens(token_index=a, token_ids=ids[a:b], logprobs=told)))
    if not choice.finished:
        pieces.append(choice.finish(finished))
    [whole] = joined(pieces)
    return whole


@given(
    TEXTS,
    st.lists(st.text(alphabet="yes no", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(0, 30), max_size=4),
    ENDS,
    st.booleans(),
    st.booleans(),
)
def test_as_many_ids_and_logprobs_are_told_as_tokens_are_counted(
    language: Language, text, stops, cuts, end, include, skip
) -> None:
    ids = language.tokenizer.encode(text, add_special_tokens=False)
    decoder = StreamDecoder(language.tokenizer, skip_special_tokens=skip)
    [word] = language.tokenizer.encode("yes", add_special_tokens=False)[:1]
    last = {"eos": language.config.eos_token_ids[0], "stop_token": word}.get(end)
    choice = GrowingChoice(0, decoder, Ending(stops, frozenset({word}), include))
    finished = pb.Finished(
        reason=pb.FINISH_REASON_LENGTH if last is None else pb.FINISH_REASON_STOP,
        stop_token_id=last,
        stop_logprob=None if last is None else pb.TokenLogprob(logprob=-last),
    )

    told = fed(choice, ids, cuts, finished)

    made = ids if last is None else [*ids, last]
    assert told.token_ids == made[: choice.num_tokens]
    assert [-entry.logprob for entry in told.logprobs] == told.token_ids
    if not isinstance(told.stop_reason, str):  # no stop string
        assert told.token_ids == made
        shown = last is not None and include
        shown_ids = made if shown else ids
        assert told.text == language.tokenizer.decode(shown_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["story"]}, {"stop_token_ids": [9]}])
async def test_usage_ids_and_logprobs_agree_on_both_routes(
    open_house, scripts, route, stream, fields
) -> None:
    chat = route.endswith("chat/completions")
    asked = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a b"}
    wanted = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    body = asked | wanted | fields | {"return_token_ids": True, "stream": stream, "max_tokens": 30}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with open_house(scripts.says("this is a story")) as house:
        response = await house.client.post(route, json=body)

    assert response.status_code == 200, response.text
    if stream:
        blocks = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
        answers = [json.loads(block) for block in blocks if block.startswith("{")]
    else:
        answers = [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids") or []]
    told = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    entries = [entry for part in told for entry in part["content" if chat else "token_logprobs"]]
    assert len(ids) == len(entries) == answers[-1]["usage"]["completion_tokens"]
    if "stop" not in fields:
        ending = [*scripts.ids("this is a story"), *scripts.language.config.eos_token_ids]
        assert sorted(ids) == sorted(ending * fields.get("n", 1))


async def test_offsets_do_not_depend_on_how_an_answer_is_cut(open_house, scripts) -> None:
    body = {"prompt": "hello", "logprobs": 0, "max_tokens": 30, "n": 2}
    async with open_house(scripts.says("a \u20ac story")) as house:
        whole = (await house.client.post("/v1/completions", json=body)).json()
        text = (await house.client.post("/v1/completions", json={**body, "stream": True})).text

    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    for index, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        told = [part["logprobs"] for part in mine if part["logprobs"]]
        for name in ("text_offset", "tokens", "token_logprobs"):
            assert [x for part in told for x in part[name]] == choice["logprobs"][name]


async def test_an_end_token_after_a_lost_worker_is_told_once(open_house, scripts) -> None:
    """The first worker breaks off before the end; the second one goes on, and tells the end token."""
    ids = scripts.ids("this is a story")

    async def breaks(submit: pb.Submit, emit) -> None:
        told = [pb.TokenLogprob(logprob=-0.5)] * 2
        emit(tokens=pb.Tokens(token_index=0, token_ids=ids[:2], logprobs=told))
        emit(failure=pb.Failure(code="worker_lost", retryable=True, http_status=503))

    async def goes_on(submit: pb.Submit, emit) -> None:
        if not submit.generation.num_resumed_tokens:
            return await breaks(submit, emit)
        rest = ids[submit.generation.num_resumed_tokens :]
        told = [pb.TokenLogprob(logprob=-0.5)] * len(rest)
        emit(tokens=pb.Tokens(token_index=0, token_ids=rest, logprobs=told))
        emit(finished=scripts.finished(submit, len(rest)))

    body = {"prompt": "a", "logprobs": 0, "max_tokens": 30, "return_token_ids": True}
    async with open_house(goes_on, goes_on) as house:
        answer = (await house.client.post("/v1/completions", json=body)).json()

    [choice] = answer["choices"]
    assert choice["token_ids"] == [*ids, *scripts.language.config.eos_token_ids]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * len(ids) + [-0.25]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
