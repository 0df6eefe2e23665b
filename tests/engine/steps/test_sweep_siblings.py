"""Prompts that begin alike, in one sweep: what they share is computed once, and changes no number."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.parity.cases import VOCAB_SIZE
from moesaic.engine.sequences.requests import RequestKey, ScoringTask
from moesaic.prefix.blocks import BLOCK_SIZE
from tests.engine.rig import LIMITS, rig

NUM_LAYERS = 3  # of the tiny model
FREE = ScoringTask(((5,),), store_kv=False)


def tokens_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


def siblings(shared: int, own: list[int]) -> dict[str, list[int]]:
    """Prompts with a common beginning, each going on with a token of its own."""
    prefix = tokens_of(7, shared)
    return {str(i): [*prefix, 10 + i, *tokens_of(i, n - 1)] for i, n in enumerate(own)}


@settings(max_examples=12, deadline=None)
@given(
    shared=st.integers(0, 100),
    own=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    rows=st.integers(9, 60),
)
async def test_siblings_share_their_beginning_in_a_sweep_and_score_as_alone(
    model: Any, shared: int, own: list[int], rows: int
) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=rows, sweep_blocks=96)
    labels, asked = ((5,), (9, 3, 4)), siblings(shared, own)
    async with rig(model, limits=limits, num_blocks=128) as r:
        for name, tokens in asked.items():
            r.submit(f"alone {name}", tokens, ScoringTask(labels, store_kv=False), cache_salt=name)
        await r.ended(*(f"alone {name}" for name in asked))
        del r.dispatcher.asked[:]
        for name, tokens in asked.items():
            r.submit(name, tokens, ScoringTask(labels, store_kv=False))
        await r.ended(*asked)

        for name in asked:
            assert r.scores(name) == r.scores(f"alone {name}")
            assert r.cached(f"alone {name}") == 0
        # Who brings few rows joins those that are there; others are swept by themselves.
        together = [r.cached(name) for name in asked if r.cached(name)]
    assert set(together) <= {shared // BLOCK_SIZE * BLOCK_SIZE}


async def test_siblings_of_a_long_prompt_compute_its_rows_once_a_layer(tiny_model: Any) -> None:
    asked = siblings(96, [4, 3, 5])
    async with rig(tiny_model) as r:  # 24 rows a slice
        for name, tokens in asked.items():
            r.submit(name, tokens, FREE)
        await r.ended(*asked)

        last = NUM_LAYERS - 1  # through which only those go whose logits are wanted
        rows = sum(rows for layer, rows in r.dispatcher.asked if layer < last)
        assert rows == last * (96 + 4 + 3 + 5)
        assert [r.cached(name) for name in asked] == [0, 96, 96]


async def test_siblings_join_a_sweep_in_its_first_layer_only(tiny_model: Any) -> None:
    asked = siblings(96, [4, 3, 5])
    async with rig(tiny_model) as r:  # five slices a layer
        for name, num_slices in (("0", 0), ("1", 3), ("2", 7)):
            while len(r.dispatcher.asked) < num_slices:
                await asyncio.sleep(0)
            r.submit(name, asked[name], FREE)
        await r.ended(*asked)

        assert [r.cached(name) for name in asked] == [0, 96, 0]
        for name, tokens in asked.items():
            rows = tiny_model.logits(tokens).log_softmax(-1)
            assert r.scores(name) == pytest.approx([float(rows[-1, 5])], abs=1e-4)


@pytest.mark.parametrize("num_slices", [1, 4, 9])
async def test_a_cancelled_sibling_leaves_the_others_what_they_share(
    tiny_model: Any, num_slices: int
) -> None:
    asked = siblings(96, [20, 3, 5])
    async with rig(tiny_model) as r:
        for name, tokens in asked.items():
            r.submit(name, tokens, FREE)
        while len(r.dispatcher.asked) < num_slices:
            await asyncio.sleep(0)
        r.engine.cancel(RequestKey("0"))
        r.submit("next", tokens_of(3, 100), FREE)  # takes the blocks that nobody has any more
        await r.ended("1", "2", "next")

        for name, tokens in (("1", asked["1"]), ("2", asked["2"]), ("next", tokens_of(3, 100))):
            rows = tiny_model.logits(tokens).log_softmax(-1)
            assert r.scores(name) == pytest.approx([float(rows[-1, 5])], abs=1e-4)


async def test_nobody_shares_with_another_tenant(tiny_model: Any) -> None:
    asked = siblings(96, [4, 3])
    async with rig(tiny_model) as r:
        r.submit("0", asked["0"], FREE)
        r.submit("1", asked["1"], FREE, cache_salt="other")
        r.submit("exact", asked["1"], FREE, min_threshold=1.0)
        await r.ended("0", "1", "exact")

        assert [r.cached(name) for name in ("0", "1", "exact")] == [0, 0, 0]
