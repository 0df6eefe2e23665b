"""The engine on a real decoder: what it answers is what a plain forward pass answers, whatever
happens around it."""

from dataclasses import replace
from typing import Any

import pytest

from moesaic.engine.sequences.requests import (
    FinishEvent,
    GenerationTask,
    PromptEvent,
    Sampling,
    ScoreEvent,
    ScoringTask,
    TokenEvent,
)
from tests.engine.rig import LIMITS, Rig, prompts, rig


async def test_many_requests_at_once_get_the_tokens_each_would_get_alone(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        asked = prompts(12)
        for name, tokens in asked.items():
            r.submit(name, tokens, GenerationTask(max_tokens=10))
        await r.ended(*asked)

        for name, tokens in asked.items():
            assert r.tokens(name) == tiny_model.greedy(tokens, 10)


async def test_no_bit_depends_on_how_steps_are_cut_by_the_time_they_take(tiny_model: Any) -> None:
    asked = {name: tokens * 3 for name, tokens in prompts(6).items()}
    limits = replace(LIMITS, max_num_batched_tokens=200)
    told: list[list[object]] = []
    cut: list[list[int]] = []
    for step_target_s in (0.0, 1e-9):  # no step is ever as fast as the latter
        async with rig(tiny_model, limits=limits, step_target_s=step_target_s) as r:
            for name, tokens in asked.items():
                r.submit(name, tokens, GenerationTask(max_tokens=6, top_logprobs=3))
            r.submit("score", [7] * 100, ScoringTask(((5,), (5, 6, 7), (9,) * 18)))
            await r.ended(*asked, "score")
            told.append([event for name in asked for event in r.events_of(name)])
            told[-1] += r.scores("score")
            cut.append([rows for layer, rows in r.dispatcher.asked if layer == 0])

    assert cut[0] != cut[1]
    assert told[0] == told[1]


async def test_preempted_answers_lose_nothing(tiny_model: Any) -> None:
    async with rig(tiny_model, num_blocks=8) as r:
        asked = prompts(5)
        for name, tokens in asked.items():
            r.submit(name, tokens, GenerationTask(max_tokens=30))
        await r.ended(*asked)

        for name, tokens in asked.items():
            assert r.tokens(name) == tiny_model.greedy(tokens, 30)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
async def test_scores_are_the_log_probabilities_of_whole_candidates(
    tiny_model: Any, length: int
) -> None:
    prompt = prompts(40)["r3"][:1] * length
    candidates = (
        (5,),
        (5, 6),
        (5, 6, 7),
        (9, 8, 7, 6, 5, 4, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        (4, 1),
    )

    async with rig(tiny_model) as r:
        r.submit("busy", prompts(2)["r1"], GenerationTask(max_tokens=20))
        r.submit("score", prompt, ScoringTask(candidates))
        await r.ended("score", "busy")

        [told] = [e for e in r.events if isinstance(e, ScoreEvent)]
    for candidate, logprob in zip(candidates, told.logprobs, strict=True):
        rows = tiny_model.logits([*prompt, *candidate]).log_softmax(-1)
        expected = sum(float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(candidate))
        assert logprob == pytest.approx(expected, abs=1e-4)


async def test_more_candidates_than_blocks_are_scored_in_turns(tiny_model: Any) -> None:
    candidates = tuple((a, b) for a in range(2, 12) for b in range(3))

    async with rig(tiny_model, num_blocks=8) as r:
        r.submit("score", list(range(2, 30)), ScoringTask(candidates))
        await r.ended("score")

        [told] = [e for e in r.events if isinstance(e, ScoreEvent)]
    rows = tiny_model.logits(list(range(2, 30))).log_softmax(-1)
    assert told.logprobs[0] < float(rows[-1, 2])
    assert len(told.logprobs) == 30


async def test_the_stop_token_ends_an_answer_and_is_told_with_its_end(tiny_model: Any) -> None:
    expected = tiny_model.greedy([5, 6, 7], 12)
    stop = expected[4]
    first = expected.index(stop)

    async with rig(tiny_model) as r:
        task = GenerationTask(max_tokens=12, stop_token_ids=frozenset({stop}), top_logprobs=2)
        r.submit("stops", [5, 6, 7], task)
        await r.ended("stops")

        assert r.tokens("stops") == expected[:first]
        finish = r.last("stops")
    assert isinstance(finish, FinishEvent)
    assert (finish.reason, finish.stop_token_id) == ("stop", stop)
    assert finish.completion_tokens == first + 1
    row = tiny_model.logits([5, 6, 7, *expected[:first]])[-1].log_softmax(-1)
    assert finish.stop_logprob is not None
    assert finish.stop_logprob.logprob == pytest.approx(float(row[stop]), abs=1e-4)
    assert [token for token, _ in finish.stop_logprob.top] == row.topk(2).indices.tolist()


async def test_min_tokens_holds_the_stop_token_back(tiny_model: Any) -> None:
    stop = tiny_model.greedy([5, 6, 7], 1)[0]

    async with rig(tiny_model) as r:
        r.submit(
            "g",
            [5, 6, 7],
            GenerationTask(max_tokens=5, min_tokens=3, stop_token_ids=frozenset({stop})),
        )
        await r.ended("g")

        assert len(r.tokens("g")) >= 3
        assert stop not in r.tokens("g")


async def test_a_sampled_answer_resumes_elsewhere_with_the_same_tokens(tiny_model: Any) -> None:
    how = Sampling(temperature=1.0, seed=11)

    async with rig(tiny_model) as r:
        r.submit("a", [3, 4], GenerationTask(max_tokens=8, sampling=how))
        r.submit("b", [3, 4], GenerationTask(max_tokens=8, sampling=how))
        r.submit(
            "other seed", [3, 4], GenerationTask(max_tokens=8, sampling=Sampling(1.0, seed=12))
        )
        await r.ended("a", "b", "other seed")
        sent = r.tokens("a")[:5]
        r.submit("rest", [3, 4, *sent], GenerationTask(max_tokens=3, sampling=how))
        await r.ended("rest")

        assert r.tokens("a") == r.tokens("b") != r.tokens("other seed")
        assert sent + r.tokens("rest") == r.tokens("a")


def logprobs_told(r: Rig, name: str) -> dict[int, Any]:
    told: dict[int, Any] = {}
    for event in r.events:
        if isinstance(event, PromptEvent) and event.key.request_id == name:
            for position, logprob in enumerate(event.logprobs, event.first_position):
                assert position not in told
                told[position] = logprob
    return told


@pytest.mark.parametrize("num_blocks", [64, 8])  # 8: prompts are preempted on their way
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_prompt_s_log_probabilities_are_those_of_one_plain_pass(
    tiny_model: Any, num_blocks: int, max_tokens: int
) -> None:
    asked = prompts(6) | {"one token": [7]}
    task = GenerationTask(max_tokens=max_tokens, prompt_logprobs=2)
    async with rig(tiny_model, num_blocks) as r:
        r.submit("fills the cache", asked["r2"], GenerationTask(max_tokens=1))
        await r.ended("fills the cache")
        for name, tokens in asked.items():
            r.submit(name, tokens, task)
        await r.ended(*asked)

        for name, tokens in asked.items():
            told = logprobs_told(r, name)
            expected = tiny_model.logits(tokens).log_softmax(-1)
            assert list(told) == list(range(1, len(tokens)))
            for position, entry in told.items():
                row = expected[position - 1]
                assert entry.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-4)
                assert entry.rank == 1 + int((row > row[tokens[position]]).sum())
                assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
            assert r.tokens(name) == tiny_model.greedy(tokens, 3)[:max_tokens]
            last = r.last(name)
            assert isinstance(last, FinishEvent)
            assert (last.reason, last.completion_tokens) == ("length", max_tokens)


async def test_an_answer_with_penalties_is_the_same_when_it_moves_half_way(
    tiny_model: Any,
) -> None:
    how = Sampling(
        temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.0
    )
    async with rig(tiny_model) as r:
        r.submit("stayed", [5, 6, 7], GenerationTask(max_tokens=20, sampling=how))
        await r.ended("stayed")
        whole = r.tokens("stayed")
        rest = GenerationTask(max_tokens=12, sampling=how, num_resumed=8)
        r.submit("moved", [5, 6, 7, *whole[:8]], rest)
        await r.ended("moved")

        assert r.tokens("moved") == whole[8:]


async def test_answers_have_the_same_bits_alone_and_in_company(
    tiny_model: Any,
) -> None:
    asked = prompts(6)

    async def told(names: list[str]) -> dict[str, Any]:
        async with rig(tiny_model, num_blocks=24) as r:
            for name in names:
                r.submit(name, asked[name], GenerationTask(max_tokens=8, top_logprobs=5))
            await r.ended(*names)
            tokens = [e for e in r.events if isinstance(e, TokenEvent)]
            return {name: [e.logprob for e in tokens if e.key.request_id == name] for name in names}

    alone = {name: (await told([name]))[name] for name in asked}

    assert await told(list(asked)) == alone
