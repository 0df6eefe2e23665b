"""The engine's prefix cache: the same answers, computed less."""

from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from moesaic.engine.sequences.requests import (
    GenerationTask,
    ScoreEvent,
    ScoringTask,
)
from moesaic.prefix.blocks import BLOCK_SIZE
from tests.engine.rig import HASHER, prompts, rig
from tests.waiting import until


async def test_prompts_that_begin_alike_get_the_tokens_they_get_without_a_cache(
    tiny_model: Any,
) -> None:
    common = torch.randint(2, 160, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = {
        f"{cut}/{end}": [*common[:cut], *ends]
        for cut in (15, 16, 33, 48, 70)
        for end, ends in enumerate(([], [9], [9, 8], [7] * 20))
    }

    async with rig(tiny_model, num_blocks=24) as r:  # too few for all: some are preempted, evicted
        for _ in range(2):
            for name, tokens in asked.items():
                r.submit(name, tokens, GenerationTask(max_tokens=6))
            await r.ended(*asked)
            told = {name: r.tokens(name) for name in asked}
            cached = {name: r.cached(name) for name in asked}
            r.events.clear()

            for name, tokens in asked.items():
                assert told[name] == tiny_model.greedy(tokens, 6)
                assert cached[name] < len(tokens)
                assert cached[name] % BLOCK_SIZE == 0
            assert sum(cached.values()) > 0


@pytest.mark.parametrize("length", [16, 17, 31, 32, 40])
async def test_candidates_behind_a_cached_prompt_score_as_behind_a_fresh_one(
    tiny_model: Any, length: int
) -> None:
    prompt = prompts(40)["r3"][:1] * length
    candidates = ((5,), (5, 6), (9, 8, 7, 6, 5, 4, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
    scores = []
    for hasher in (None, HASHER):
        async with rig(tiny_model, hasher=hasher) as r:
            for name in ("first", "again"):
                r.submit(name, prompt, ScoringTask(candidates))
                await r.ended(name)
            scores += [e.logprobs for e in r.events if isinstance(e, ScoreEvent)]
            cached = [r.cached(name) for name in ("first", "again")]
        assert cached == ([0, (length - 1) // 16 * 16] if hasher else [0, 0])

    for logprobs in scores:
        assert logprobs == scores[0]


async def test_what_the_cache_saved_is_counted(tiny_model: Any) -> None:
    queries, hits = (
        lambda name=name: REGISTRY.get_sample_value(f"moesaic_prefix_cache_{name}_total") or 0
        for name in ("queries", "hits")
    )
    before = queries(), hits()
    async with rig(tiny_model) as r:
        for name in ("first", "again"):
            r.submit(name, [5] * 40, GenerationTask(max_tokens=1))
            await r.ended(name)
        assert r.engine.batcher.pool.num_cached == 2
        await until(lambda: queries() - before[0] >= 80)  # counted once nothing is left to do

    assert (queries() - before[0], hits() - before[1]) == (80, 32)
