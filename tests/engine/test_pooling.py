"""Vectors of prompts: outputs of the final norm, as transformers gives them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.parity.cases import CASES, build_reference, prompt_of
from moesaic.engine.sequences.requests import (
    FinishEvent,
    GenerationTask,
    PooledEvent,
    ProgressEvent,
    ScoringTask,
)
from moesaic.prefix.blocks import BLOCK_SIZE
from tests.engine.rig import LIMITS, Rig, rig

FAMILIES = ("qwen3_moe", "deepseek_v2", "granitemoe", "gpt_oss", "mixtral")
BASES = [case for case in CASES if case.name == "base" and case.family in FAMILIES]
LAST, MEAN = ScoringTask(pooling="last"), ScoringTask(pooling="mean")
LENGTH = 3 * LIMITS.max_num_batched_tokens + 5  # so a prompt takes several steps


@pytest.fixture(scope="module", params=BASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    return build_reference(request.param, directory), SimpleNamespace(directory=directory)


def states(reference: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        told = reference(torch.tensor([prompt]), output_hidden_states=True)
    rows: torch.Tensor = told.hidden_states[-1][0].float()
    return rows


def vector(r: Rig, name: str) -> torch.Tensor:
    told = [e for e in r.events if isinstance(e, PooledEvent) and e.key.request_id == name]
    [event] = told
    assert isinstance(r.last(name), FinishEvent)
    return torch.tensor(event.values)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


async def test_vectors_are_those_of_transformers_beside_other_requests(pair: Any) -> None:
    reference, model = pair
    one, other, short = prompt_of(LENGTH, 1), prompt_of(LENGTH - 20, 2), prompt_of(1, 3)

    async with rig(model) as r:
        r.submit("answer", prompt_of(20, 4), GenerationTask(max_tokens=12))
        r.submit("last", one, LAST)
        r.submit("scores", other, ScoringTask(((5,), (6, 7))))
        r.submit("mean", other, MEAN)
        r.submit("short", short, MEAN)
        r.submit("swept", one, ScoringTask(pooling="last", store_kv=False))
        r.submit("swept scores", one, ScoringTask(((5,), (6, 7)), store_kv=False))
        names = ("answer", "last", "scores", "mean", "short", "swept", "swept scores")
        await r.ended(*names)

        assert_close(vector(r, "last"), states(reference, one)[-1])
        assert_close(vector(r, "swept"), states(reference, one)[-1])
        assert_close(vector(r, "mean"), states(reference, other).mean(dim=0))
        assert_close(vector(r, "short"), states(reference, short)[0])
        assert len(r.tokens("answer")) == 12


async def test_a_cached_beginning_serves_the_last_token_and_no_mean(pair: Any) -> None:
    reference, model = pair
    prompt = prompt_of(LENGTH, 5)

    async with rig(model) as r:
        for name, task in (("first", MEAN), ("last", LAST), ("mean", MEAN)):
            r.submit(name, prompt, task)
            await r.ended(name)

        assert_close(vector(r, "last"), states(reference, prompt)[-1])
        assert_close(vector(r, "mean"), states(reference, prompt).mean(dim=0))
        cached = [r.cached(name) for name in ("first", "last", "mean")]
        assert cached == [0, (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE, 0]


async def test_a_step_that_fails_adds_nothing_to_a_mean(tiny_model: Any) -> None:
    prompt = prompt_of(LENGTH, 6)
    async with rig(tiny_model) as r:
        r.submit("whole", prompt, MEAN)
        await r.ended("whole")
        r.submit("again", prompt, MEAN)
        r.dispatcher.failures = 3
        await r.ended("again")

        torch.testing.assert_close(vector(r, "again"), vector(r, "whole"))


async def test_a_mean_that_gives_way_begins_again(tiny_model: Any) -> None:
    prompt = prompt_of(LENGTH, 7)
    async with rig(tiny_model, num_blocks=LENGTH // BLOCK_SIZE + 1) as r:
        r.submit("alone", prompt, MEAN)
        await r.ended("alone")
        r.submit("mean", prompt, MEAN, priority=1)
        await r.until(lambda: any(e.key.request_id == "mean" for e in r.events))
        r.submit("urgent", prompt_of(40, 8), GenerationTask(max_tokens=2), priority=-1)
        await r.ended("mean", "urgent")

        progress = [
            e.computed_tokens
            for e in r.events
            if isinstance(e, ProgressEvent) and e.key.request_id == "mean"
        ]
        # It was computed in part, then from the beginning.
        assert progress != sorted(set(progress))
        torch.testing.assert_close(vector(r, "mean"), vector(r, "alone"))


async def test_the_output_head_is_not_computed_for_vectors(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tiny_model) as r:
        rows = []
        decoder = r.engine._computer._decoder
        monkeypatch.setattr(decoder, "head", lambda x: rows.append(len(x)))
        r.submit("last", prompt_of(LENGTH, 9), LAST)
        r.submit("mean", prompt_of(LENGTH, 10), MEAN)
        await r.ended("last", "mean")

        assert not rows
