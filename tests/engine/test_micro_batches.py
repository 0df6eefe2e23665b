"""A step in parts that run side by side does what the whole does, or nothing."""

import asyncio
import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.engine import micro_batches
from moesaic.engine.micro_batches import LEAST_ROWS, run_together, split, split_evenly
from moesaic.engine.sequences.requests import Event, GenerationTask, Sampling, ScoringTask
from moesaic.engine.sequences.sequence import Chunk
from moesaic.errors import ExpertUnavailable
from tests.engine.rig import Rig, prompts, rig


def chunks_of(rows: list[int]) -> list[Chunk]:
    owner: Any = None
    return [Chunk(owner, [0] * num, at, [], wanted=1) for at, num in enumerate(rows)]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 8))
def test_parts_are_the_whole_in_its_order_and_none_is_small(rows: list[int], count: int) -> None:
    chunks = chunks_of(rows)

    parts = split(chunks, count)

    assert [chunk for part in parts for chunk in part] == chunks
    assert 1 <= len(parts) <= count
    if len(parts) > 1:
        sizes = [sum(len(chunk.token_ids) for chunk in part) for part in parts]
        assert min(sizes) >= LEAST_ROWS
        assert min(sizes) >= sum(rows) / len(parts) / 2


def test_single_rows_are_cut_evenly_and_few_are_not_cut() -> None:
    assert [len(part) for part in split(chunks_of([1] * 33), 2)] == [16, 17]
    assert [len(part) for part in split(chunks_of([1] * (2 * LEAST_ROWS)), 4)] == [LEAST_ROWS] * 2
    assert len(split(chunks_of([1] * (2 * LEAST_ROWS - 1)), 2)) == 1
    assert len(split(chunks_of([500, 1, 1, 1]), 2)) == 1  # one prompt cannot be cut


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_even_parts_have_all_rows_once_and_want_what_the_step_wants(
    shapes: list[tuple[int, int]], count: int
) -> None:
    owner: Any = None
    rows, chunks = itertools.count(), []
    for num, wanted in shapes:
        tokens = list(itertools.islice(rows, num))
        chunks.append(Chunk(owner, tokens, tokens[0] * 2, [num], wanted=min(num, wanted)))
    total = sum(num for num, _ in shapes)

    parts = split_evenly(chunks, count)

    sizes = [sum(len(chunk.token_ids) for chunk in part) for part in parts]
    assert len(parts) == max(1, min(count, total // LEAST_ROWS))
    assert max(sizes) - min(sizes) <= 1
    assert _row_by_row([c for part in parts for c in part]) == _row_by_row(chunks)
    assert all(c.token_ids for part in parts for c in part)


def _row_by_row(chunks: list[Chunk]) -> list[tuple[int, int, list[int], bool]]:
    """Token, position, blocks of every row, and whether its logits are wanted."""
    return [
        (token, chunk.start + i, chunk.block_table, i >= len(chunk.token_ids) - chunk.wanted)
        for chunk in chunks
        for i, token in enumerate(chunk.token_ids)
    ]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "LEAST_ROWS", 1)


async def told(tiny_model: Any, count: int, failing: bool = False) -> dict[str, list[Event]]:
    """The events of mixed work, by request, with steps in up to ``count`` parts."""
    asked = prompts(7)
    async with rig(tiny_model, micro_batches=count) as r:
        r.dispatcher.turns = 3
        for name, tokens in asked.items():
            sampling = Sampling(temperature=0.8, seed=5) if name == "r1" else Sampling()
            r.submit(name, tokens, GenerationTask(max_tokens=9, sampling=sampling, top_logprobs=3))
        for name in ("s0", "s1"):
            tokens = asked["r0"] if name == "s0" else asked["r3"]
            candidates = ((7, 8), (9,), (3, 4, 5))
            r.submit(name, [*tokens, 11], ScoringTask(candidates, store_kv=True))
        if failing:
            while len(r.events) < 12:
                await asyncio.sleep(0)
            r.dispatcher.failures = 3
        await r.ended(*asked, "s0", "s1")
        assert not failing or r.dispatcher.failures == 0
        if count > 1:
            await _came_together(r)
        events: dict[str, list[Event]] = {}
        for event in r.events:
            if type(event).__name__ != "ProgressEvent":  # of prompts: they may be cut elsewhere
                events.setdefault(event.key.request_id, []).append(event)
        return events


async def _came_together(r: Rig) -> None:
    """Parts really ran side by side: some layer was asked twice before any asked for the next."""
    layers = [layer for layer, _ in r.dispatcher.asked]
    assert any(one == other for one, other in pairwise(layers))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("count", [2, 3])
async def test_answers_are_those_of_whole_steps_to_the_last_bit(
    tiny_model: Any, count: int
) -> None:
    whole = await told(tiny_model, 1)

    assert await told(tiny_model, count) == whole


@pytest.mark.usefixtures("any_size")
async def test_a_part_that_fails_makes_the_step_run_again_and_nobody_notices(
    tiny_model: Any,
) -> None:
    whole = await told(tiny_model, 1)

    assert await told(tiny_model, 3, failing=True) == whole


async def test_when_one_fails_the_others_stop_at_their_next_experts_and_are_not_cancelled() -> None:
    ended: list[str] = []
    asked: list[int] = []
    failed = asyncio.Event()

    async def forward(batch: int, moe: Any) -> Tensor:
        try:
            for layer in range(4):
                await moe(layer, torch.full((1,), float(batch)))
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append(f"{batch} came through")
        return torch.zeros(1)

    async def moe(layer: int, hidden: Tensor) -> Tensor:
        batch = int(hidden)
        asked.append(batch)
        await asyncio.sleep(0)
        if layer == 1:
            if batch == 1:
                failed.set()
                raise ExpertUnavailable(layer, cause="test")
            await failed.wait()
        return hidden

    with pytest.raises(ExpertUnavailable):
        await run_together(forward, [0, 1, 2], [moe] * 3)

    assert ended == []
    assert [asked.count(batch) for batch in range(3)] == [2, 2, 2]


async def test_results_come_in_the_order_of_the_batches() -> None:
    ended = [asyncio.Event() for _ in range(3)]

    async def forward(batch: int, moe: Any) -> Tensor:
        if batch < 2:
            await ended[batch + 1].wait()
        ended[batch].set()
        return torch.tensor([batch])

    async def moe(layer: int, hidden: Tensor) -> Tensor:
        return hidden

    results = await run_together(forward, [0, 1, 2], [moe] * 3)

    assert torch.cat(results).tolist() == [0, 1, 2]
