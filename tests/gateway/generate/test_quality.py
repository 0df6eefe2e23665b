"""What answers say of their quality: of all parts, also of those whose worker had no last word."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.services.gateway.replies.accounts import provenance_of
from moesaic.services.gateway.workers.run import Run
from moesaic.v1 import attention_pb2 as pb

TEXT = "this is a story about a house"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
BODIES = {"completions": {"prompt": "hello", "max_tokens": 100}, "chat/completions": CHAT}
EXACT = pb.Degradation(mean_threshold=1.0, rows=10)


def degraded(rows: int, threshold: float, share: float) -> pb.Degradation:
    return pb.Degradation(rows=rows, mean_threshold=threshold, share=share)


def quality_of(text: str) -> dict[str, float]:
    """What an answer says, or the last event of a stream that says anything."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    told = [json.loads(line) for line in lines or [text]]
    quality: dict[str, float] = [each["moesaic"] for each in told if "moesaic" in each][-1][
        "quality"
    ]
    return quality


def says(
    scripts: Any, count: int | None, told: Sequence[pb.Degradation | None], last: Any = None
) -> Any:
    """A script that says so many tokens, the first of them with what is told; ``last``: its last word."""

    async def script(submit: pb.Submit, emit: Any) -> None:
        ids = scripts.ids(TEXT)
        rest = ids[submit.generation.num_resumed_tokens :][:count]
        for index, token_id in enumerate(rest):
            degradation = told[index] if index < len(told) else None
            tokens = pb.Tokens(token_index=index, token_ids=[token_id], degradation=degradation)
            emit(tokens=tokens)
        if last is not None:
            finished = scripts.finished(submit, len(rest))
            finished.degradation.CopyFrom(last)
            emit(finished=finished)

    return script


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_both_parts_of_a_run_that_was_moved_count(
    open_house, scripts, path: str, stream: bool
) -> None:
    lost = says(scripts, 2, [degraded(20, 0.5, 0.25), degraded(30, 0.5, 0.2)])
    async with open_house(lost, says(scripts, None, [EXACT], degraded(10, 0.9, 0.1))) as house:
        first = house.workers[0]
        body = {**BODIES[path], "stream": stream}
        asking = asyncio.ensure_future(house.client.post(f"/v1/{path}", json=body))
        await house.until(lambda: bool(first.submits))
        await house.heard(first)
        await first.kill()
        response = await asking

    assert quality_of(response.text) == {"mean_threshold": 0.6, "degraded_share": 0.175}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_stop_string_cuts_says_what_it_got(
    open_house, scripts, path: str, stream: bool
) -> None:
    script = says(scripts, None, [degraded(20, 0.5, 0.25)])
    async with open_house(script) as house:
        body = {**BODIES[path], "stream": stream, "stop": ["story ab"]}
        response = await house.client.post(f"/v1/{path}", json=body)

    told = quality_of(response.text)
    assert told["degraded_share"] > 0
    assert 0.5 <= told["mean_threshold"] < 1


async def test_an_answer_whose_last_word_was_lost_says_what_it_got(open_house, scripts) -> None:
    num_tokens = len(scripts.ids(TEXT))
    script = says(scripts, None, [EXACT] * (num_tokens - 1) + [degraded(40, 0.5, 0.25)])
    async with open_house(script) as house:
        [worker] = house.workers
        body = {"prompt": "hello", "max_tokens": num_tokens}
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=body))
        await house.until(lambda: bool(worker.submits))
        await house.heard(worker)
        await worker.kill()
        response = await asking

    assert quality_of(response.text) == {"mean_threshold": 0.5, "degraded_share": 0.25}


async def test_a_part_that_is_not_told_hides_no_other(open_house, scripts) -> None:
    lost = says(scripts, 2, [])
    async with open_house(lost, says(scripts, None, [], degraded(10, 0.9, 0.1))) as house:
        first = house.workers[0]
        asking = asyncio.ensure_future(
            house.client.post("/v1/completions", json=BODIES["completions"])
        )
        await house.until(lambda: bool(first.submits))
        await house.heard(first)
        await first.kill()
        response = await asking

    assert quality_of(response.text)["degraded_share"] == 0.1


async def test_a_classification_that_was_run_again_says_what_its_scores_got(
    open_house, scripts
) -> None:
    async def scores(submit: pb.Submit, emit: Any) -> None:
        emit(scores=pb.Scores(logprobs=[-2.0, -1.0]))
        finished = scripts.finished(submit, 0, stop=False)
        finished.degradation.CopyFrom(degraded(10, 0.9, 0.1))
        emit(finished=finished)

    async with open_house(scripts.silent, scores) as house:
        first = house.workers[0]
        body = {"input": "a story", "labels": ["yes", "no"]}
        asking = asyncio.ensure_future(house.client.post("/v1/classify", json=body))
        await house.until(lambda: bool(first.submits))
        await first.kill()
        response = await asking

    assert quality_of(response.text) == {"mean_threshold": 0.9, "degraded_share": 0.1}


shares = st.floats(0, 1, allow_subnormal=False)
parts = st.builds(degraded, st.integers(1, 1 << 40), shares, shares)


@given(st.lists(st.lists(st.one_of(st.none(), parts), min_size=1, max_size=4), min_size=1))
def test_no_answer_hides_that_it_was_degraded(told: list[list[pb.Degradation | None]]) -> None:
    runs = [Run([1], pb.Generation()) for _ in told]
    for run, of_run in zip(runs, told, strict=True):
        run.parts = dict(enumerate(of_run))

    quality = provenance_of([], runs, 0, False).quality

    known = [part for of_run in told for part in of_run if part is not None]
    if any(part.share > 0 for part in known):
        assert quality is not None
        assert 0 < quality.degraded_share <= 1
    if any(part.mean_threshold < 1 for part in known):
        assert quality is not None
        assert 0 <= quality.mean_threshold < 1
    if quality is None:
        assert len(known) < sum(map(len, told))
