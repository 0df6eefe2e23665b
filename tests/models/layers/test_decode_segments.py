"""A decode step in segments, called one by one, gives the bits of the whole step."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.cases import CASES, Served, build_reference, prompt_of
from moesaic.errors import ExpertUnavailable
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.step_batch import StepBatch

SOME = [
    case
    for case in CASES
    if case.name
    in ("base", "sliding window", "every second layer sparse", "biased, dense mix", "biased")
]
TABLES = [[9, 8, 7, 6, 5], [2, 0, 1, 3, 4], [10, 11, 12, 13, 14]]
PROMPTS = [prompt_of(length, seed=length) for length in (9, 25, 1)]


@pytest.fixture(params=SOME, ids=str)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Served, Served]:
    """The same model twice, each with the same prompts in its cache."""
    build_reference(request.param, tmp_path)
    served = Served(tmp_path), Served(tmp_path)
    for each in served:
        each.forward([(p, 0, t) for p, t in zip(PROMPTS, TABLES, strict=True)])
    return served


class Watched:
    """Experts that note what they are asked."""

    def __init__(self, moe: Any) -> None:
        self._moe = moe
        self.asked: list[tuple[int, int]] = []
        self.fail_at = -1

    def __call__(self, layer: int, hidden_states: Tensor) -> Awaitable[Tensor]:
        self.asked.append((layer, len(hidden_states)))
        return self._answer(layer, hidden_states.clone())

    async def _answer(self, layer: int, hidden_states: Tensor) -> Tensor:
        await asyncio.sleep(0)
        if layer == self.fail_at:
            raise ExpertUnavailable(layer, cause="test")
        answer: Tensor = await self._moe(layer, hidden_states)
        return answer


def decoded(count: int, prompts: list[list[int]], seed: int) -> StepBatch:
    tokens = prompt_of(count, seed=seed)
    return StepBatch(
        token_ids=tokens,
        positions=[len(prompt) for prompt in prompts[:count]],
        sequence_rows=[1] * count,
        block_tables=TABLES[:count],
        wanted=[1] * count,
    )


def assert_same_cache(one: Served, other: Served) -> None:
    for layer in range(one.config.num_layers):
        assert torch.equal(one.cache.rows(layer), other.cache.rows(layer))


def test_segments_give_the_bits_of_whole_steps(twins: tuple[Served, Served]) -> None:
    whole, cut = twins
    segments = DecodeSegments(cut.decoder, cut.cache, max_rows=3, max_length=64)
    prompts = [list(prompt) for prompt in PROMPTS]
    experts = Watched(cut.moe)
    assert_same_cache(whole, cut)  # preparing writes nothing

    for step in range(9):
        count = 1 + step % 3
        batch = decoded(count, prompts, step)
        assert segments.takes(batch)

        got = asyncio.run(segments.forward(batch, experts))

        expected = asyncio.run(whole.decoder.forward(batch, whole.cache, whole.moe))
        assert torch.equal(got, expected)
        assert_same_cache(whole, cut)
        assert experts.asked == [(layer, count) for layer in cut.config.moe_layers]
        experts.asked.clear()
        for prompt, token in zip(prompts, batch.token_ids, strict=False):
            prompt.append(token)


def test_a_step_whose_experts_fail_may_run_again(twins: tuple[Served, Served]) -> None:
    whole, cut = twins
    segments = DecodeSegments(cut.decoder, cut.cache, max_rows=4, max_length=64)
    experts, batch = Watched(cut.moe), decoded(3, PROMPTS, seed=5)
    experts.fail_at = cut.config.moe_layers[-1]
    with pytest.raises(ExpertUnavailable):
        asyncio.run(segments.forward(batch, experts))
    experts.fail_at = -1

    got = asyncio.run(segments.forward(batch, experts))

    assert torch.equal(got, asyncio.run(whole.decoder.forward(batch, whole.cache, whole.moe)))
    assert_same_cache(whole, cut)


def test_logits_of_an_earlier_step_stay_as_they_were(twins: tuple[Served, Served]) -> None:
    cut = twins[1]
    segments = DecodeSegments(cut.decoder, cut.cache, max_rows=4, max_length=64)
    first = asyncio.run(segments.forward(decoded(2, PROMPTS, seed=1), cut.moe))
    kept = first.clone()

    asyncio.run(segments.forward(decoded(2, PROMPTS, seed=2), cut.moe))

    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("counts", "wanted", "positions"),
    [
        ([1, 2], [1, 2], [3, 4, 5]),  # a chunk
        ([1, 1], [1, 0], [3, 4]),  # logits that nobody wants
        ([1], [1], [64]),  # longer than captured
        ([1] * 5, [1] * 5, [1] * 5),  # more rows
    ],
)
def test_other_steps_are_left_to_the_plain_way(
    tmp_path: Path, counts: list[int], wanted: list[int], positions: list[int]
) -> None:
    build_reference(CASES[0], tmp_path)
    served = Served(tmp_path)
    segments = DecodeSegments(served.decoder, served.cache, max_rows=4, max_length=64)
    tables = [TABLES[0]] * len(counts)

    batch = StepBatch([1] * len(positions), positions, counts, tables, wanted)

    assert not segments.takes(batch)
