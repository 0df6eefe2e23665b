"""Requests under brownout: what they are promised holds, and they are told what became of them."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.engine.sequences.requests import (
    FailureEvent,
    FinishEvent,
    GenerationTask,
    PromptEvent,
    ScoringTask,
    TokenEvent,
)
from moesaic.errors import ExpertUnavailable
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.substitution import Substitution
from tests.engine.rig import Halves, Rig, rig
from tests.engine.test_shortcut import making

PAIRS = Substitution(way=2, instead="united")
TASK = GenerationTask(max_tokens=12, top_logprobs=3)
PROMPTS = {f"r{n}": [(7 * n + i) % 90 for i in range(20 + n)] for n in range(6)}


def degrade(
    r: Rig, substitution: Substitution = PAIRS, prefill: float = 0.2, decode: float = 0.2
) -> None:
    r.dispatcher.adopt(r.dispatcher.substitutions.load(substitution))
    manual = BrownoutPolicy(mode="manual", prefill_threshold=prefill, decode_threshold=decode)
    r.engine.brownout.set_policy(manual)


def answer(r: Rig, name: str) -> list[tuple[int, float]]:
    told = [e for e in r.events if isinstance(e, TokenEvent) and e.key.request_id == name]
    return [(e.token_id, e.logprob.logprob) for e in told if e.logprob is not None]


def finish(r: Rig, name: str) -> FinishEvent:
    last = r.last(name)
    assert isinstance(last, FinishEvent)
    return last


async def alone(tiny_model: Any) -> dict[str, list[tuple[int, float]]]:
    async with rig(tiny_model) as r:
        for name, tokens in PROMPTS.items():
            r.submit(name, tokens, TASK)
        await r.ended(*PROMPTS)
        assert all(finish(r, name).degradation.share == 0 for name in PROMPTS)
        assert all(finish(r, name).degradation.mean_threshold == 1 for name in PROMPTS)
        return {name: answer(r, name) for name in PROMPTS}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "substitution", [PAIRS, Substitution(instead="fewer"), Substitution(instead="nothing")], ids=str
)
async def test_exact_requests_have_their_bits_whatever_runs_beside_them(
    tiny_model: Any, substitution: Substitution, whole: bool
) -> None:
    expected = await alone(tiny_model)
    async with rig(tiny_model, shortcut=making(1000, []) if whole else None) as r:
        degrade(r, substitution)
        for n, (name, tokens) in enumerate(PROMPTS.items()):
            r.submit(name, tokens, TASK, min_threshold=1.0 if n == 2 else 0.0)
        await r.ended(*PROMPTS)

        assert answer(r, "r2") == expected["r2"]
        told = finish(r, "r2").degradation
        assert (told.mean_threshold, told.share) == (1.0, 0.0)
        others = [name for name in PROMPTS if name != "r2"]
        assert any(answer(r, name) != expected[name] for name in others)
        for name in others:
            degradation = finish(r, name).degradation
            assert degradation.mean_threshold == pytest.approx(0.2)
            assert 0 <= degradation.share < 1
            assert degradation.rows == len(PROMPTS[name]) + TASK.max_tokens - 1
        assert any(finish(r, name).degradation.share > 0 for name in others)


async def test_a_threshold_of_one_changes_nothing(tiny_model: Any) -> None:
    expected = await alone(tiny_model)
    async with rig(tiny_model) as r:
        degrade(r, prefill=1.0, decode=1.0)
        for name, tokens in PROMPTS.items():
            r.submit(name, tokens, TASK)
        await r.ended(*PROMPTS)

        assert {name: answer(r, name) for name in PROMPTS} == expected


async def test_phases_have_thresholds_of_their_own(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        degrade(r, prefill=1.0, decode=0.0)
        r.submit("a", PROMPTS["r0"], TASK)
        await r.ended("a")

        rows, answers = len(PROMPTS["r0"]) + TASK.max_tokens - 1, TASK.max_tokens - 1
        told = finish(r, "a").degradation
        assert told.mean_threshold == pytest.approx((rows - answers) / rows)
        # Of one row alone, both experts go if they are of one group, and else neither does.
        assert told.share < 1


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"moesaic_brownout_{name}_choices_total", labels) or 0


@pytest.mark.parametrize("whole", [True, False])
async def test_degraded_choices_are_counted_by_phase_layer_and_way(
    tiny_model: Any, whole: bool
) -> None:
    kinds = [(phase, str(layer)) for phase in ("prefill", "decode") for layer in range(3)]

    def by_kind() -> dict[tuple[str, str], float]:
        return {
            (phase, layer): counted("degraded", phase=phase, layer=layer, way="2")
            for phase, layer in kinds
        }

    before = by_kind()
    async with rig(tiny_model, shortcut=making(1000, []) if whole else None) as r:
        degrade(r, prefill=0.0, decode=1.0)
        for name, tokens in PROMPTS.items():
            r.submit(name, tokens, TASK)
        await r.ended(*PROMPTS)

        after = by_kind()
        accounts = [finish(r, name).degradation for name in PROMPTS]
    new = {kind: after[kind] - before[kind] for kind in kinds}
    # Of the last layer, only the rows whose logits are wanted.
    assert new["prefill", "0"] > new["prefill", "2"]
    assert new["prefill", "1"] > new["prefill", "2"]
    assert sum(new["decode", layer] for layer in "012") == 0
    # A prompt's last row passes all three layers, its others two; each chooses two experts.
    choices = [
        2 * (2 * (len(tokens) + TASK.max_tokens - 1) + TASK.max_tokens)
        for tokens in PROMPTS.values()
    ]
    told = sum(each.share * count for each, count in zip(accounts, choices, strict=True))
    assert told == pytest.approx(sum(new.values()))


async def test_a_request_gets_at_least_what_it_wants(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        degrade(r, prefill=0.0, decode=0.0)
        for n, (name, tokens) in enumerate(PROMPTS.items()):
            r.submit(name, tokens, TASK, min_threshold=n / 10)
        await r.ended(*PROMPTS)

        means = [finish(r, name).degradation.mean_threshold for name in PROMPTS]
        assert means == [pytest.approx(n / 10) for n in range(6)]


async def test_degraded_kv_is_found_by_nobody_and_exact_kv_by_all(tiny_model: Any) -> None:
    prompt = [i % 90 for i in range(64)]
    async with rig(tiny_model) as r:
        degrade(r, prefill=0.0)
        r.submit("degraded", prompt, TASK)
        await r.ended("degraded")
        r.submit("again", prompt, TASK)
        await r.ended("again")
        r.submit("exact", prompt, TASK, min_threshold=1.0)
        await r.ended("exact")
        r.submit("standard", prompt, TASK)
        await r.ended("standard")

        assert finish(r, "degraded").degradation.share > 0
        found = [r.cached(name) for name in ("degraded", "again", "exact", "standard")]
        assert found == [0, 0, 0, 48]


@pytest.mark.parametrize("store_kv", [True, False])
async def test_scores_are_promised_and_told_alike(tiny_model: Any, store_kv: bool) -> None:
    prompts = {name: [*tokens, *tokens] for name, tokens in PROMPTS.items()}
    task = ScoringTask(candidates=((5, 6, 7), (9,)), store_kv=store_kv)
    async with rig(tiny_model) as r:
        for name, tokens in prompts.items():
            r.submit(name, tokens, task)
        await r.ended(*prompts)
        expected = {name: r.scores(name) for name in prompts}
    async with rig(tiny_model) as r:
        degrade(r, prefill=0.1)
        for n, (name, tokens) in enumerate(prompts.items()):
            r.submit(name, tokens, task, min_threshold=1.0 if n == 2 else 0.0)
        await r.ended(*prompts)

        assert r.scores("r2") == expected["r2"]
        assert finish(r, "r2").degradation.share == 0
        others = [name for name in prompts if name != "r2"]
        assert any(r.scores(name) != expected[name] for name in others)
        for name in others:
            told = finish(r, name).degradation
            assert told.mean_threshold == pytest.approx(0.1)
        assert any(finish(r, name).degradation.share > 0 for name in others)


async def test_scores_of_exact_requests_share_no_rows_with_degraded_ones(tiny_model: Any) -> None:
    prompt, task = [i % 90 for i in range(60)], ScoringTask(((5, 6), (9,)), store_kv=False)
    async with rig(tiny_model) as r:
        r.submit("exact", prompt, task)
        await r.ended("exact")
        expected = r.scores("exact")
    async with rig(tiny_model) as r:
        degrade(r, prefill=0.0)
        r.submit("standard", prompt, task)
        r.submit("exact", prompt, task, min_threshold=1.0)
        await r.ended("standard", "exact")

        assert r.scores("exact") == expected
        assert r.scores("standard") != expected


def lose(r: Rig, experts: list[int]) -> None:
    """Let united experts alone serve some experts of every layer."""
    loaded = r.dispatcher.substitutions.load(PAIRS)
    lost = torch.zeros(8, dtype=torch.bool)
    lost[experts] = True
    layers = {layer: replace(each, lost=lost) for layer, each in loaded.layers.items()}
    r.dispatcher.adopt(LoadedSubstitution(PAIRS, layers, loaded.united))
    r.dispatcher.has_lost = True


async def test_while_experts_are_lost_standard_requests_go_on_and_exact_ones_wait(
    tiny_model: Any,
) -> None:
    expected = await alone(tiny_model)
    task = replace(TASK, max_tokens=40)
    async with rig(tiny_model) as r:
        r.submit("exact under way", PROMPTS["r0"], task, min_threshold=1.0)
        await r.until(lambda: len(answer(r, "exact under way")) >= 3)
        lose(r, [0, 1, 2, 3])
        r.submit("exact", PROMPTS["r1"], TASK, min_threshold=1.0)
        r.submit("some", PROMPTS["r2"], TASK, min_threshold=0.3)
        r.submit("score", PROMPTS["r4"], ScoringTask(((5,),), store_kv=False), min_threshold=1.0)
        r.submit("standard", PROMPTS["r3"], TASK)
        await r.ended("standard")
        begun = len(answer(r, "exact under way"))
        r.submit("another standard one", PROMPTS["r3"], TASK)
        await r.ended("another standard one")

        told = finish(r, "standard").degradation
        assert told.mean_threshold == 1
        assert told.share > 0
        assert len(answer(r, "exact under way")) == begun < 40
        assert not answer(r, "exact")
        assert not answer(r, "some")

        r.dispatcher.adopt(None)
        await r.ended("exact", "exact under way", "some", "score")
        assert answer(r, "exact") == expected["r1"]
        assert answer(r, "some") == expected["r2"]
        assert answer(r, "exact under way")[:12] == expected["r0"]
        for name in ("exact", "some", "exact under way", "score"):
            assert finish(r, name).degradation.share == 0


async def test_exact_requests_that_wait_for_too_long_are_told_why(tiny_model: Any) -> None:
    async with rig(tiny_model, recovery_s=0.2) as r:
        lose(r, [0, 1, 2, 3])
        r.submit("exact", PROMPTS["r1"], TASK, min_threshold=1.0)
        for n in range(3):  # others go on meanwhile
            r.submit(f"standard {n}", PROMPTS["r3"], TASK)
        await r.ended("exact")

        last = r.last("exact")
        assert isinstance(last, FailureEvent)
        assert isinstance(last.error, ExpertUnavailable)
        assert "may not be degraded" in str(last.error)
        await r.ended(*(f"standard {n}" for n in range(3)))


async def test_parts_of_a_step_may_be_promised_everything_while_others_are_not(
    tiny_model: Any,
) -> None:
    expected = await alone(tiny_model)
    async with rig(tiny_model, shortcut=Halves) as r:
        degrade(r, decode=0.0)
        for n, (name, tokens) in enumerate(PROMPTS.items()):
            r.submit(name, tokens, TASK, min_threshold=1.0 if n < 3 else 0.0)
        await r.ended(*PROMPTS)

        shares = [finish(r, name).degradation.share for name in PROMPTS]
        assert shares[:3] == [0, 0, 0]
        assert any(share > 0 for share in shares[3:])
        assert all(answer(r, name) == expected[name] for name in list(PROMPTS)[:3])


async def test_a_substitution_that_changes_during_a_step_is_that_of_the_next_one(
    tiny_model: Any,
) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.turns = 3
        degrade(r, decode=0.0)
        substitutions = [
            r.dispatcher.substitutions.load(substitution)
            for substitution in (PAIRS, Substitution(instead="fewer"))
        ]
        for name, tokens in PROMPTS.items():
            r.submit(name, tokens, TASK)
        changes = 0
        ended = asyncio.ensure_future(r.ended(*PROMPTS))
        while not ended.done():
            r.dispatcher.adopt([*substitutions, None][changes % 3])
            changes += 1
            await asyncio.sleep(0)

        assert changes > 100
        assert all(isinstance(r.last(name), FinishEvent) for name in PROMPTS)


@pytest.mark.parametrize("threshold", [0.2, 1.0])
async def test_what_is_told_with_tokens_is_what_is_told_at_the_end(
    tiny_model: Any, threshold: float
) -> None:
    async with rig(tiny_model) as r:
        degrade(r, prefill=threshold, decode=threshold)
        task = replace(TASK, prompt_logprobs=0)
        for name, tokens in PROMPTS.items():
            r.submit(name, tokens, task)
        await r.ended(*PROMPTS)

        for name, prompt in PROMPTS.items():
            events = [event for event in r.events if event.key.request_id == name]
            told = [event.degradation for event in events if isinstance(event, TokenEvent)]
            [*_, described] = [event for event in events if isinstance(event, PromptEvent)]
            assert told[0] == described.degradation
            assert told[0] is not None
            assert told[0].rows == len(prompt)
            whole = finish(r, name).degradation
            assert told[1:-1] == [None] * 10 if threshold == 1 else None not in told
            assert told[-1] == (None if threshold == 1 else whole)
