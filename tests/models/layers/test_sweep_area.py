"""Layer by layer, with one layer's keys and values kept: the same bits as with all of them."""

import asyncio
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.parity.cases import CASES, Served, build_reference, prompt_of
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.sweep_area import SweepArea

SWEPT = [case for case in CASES if case.name in ("base", "sliding window")]
BLOCK_SIZE = 8
NUM_TOKENS = 45
TABLE = [5, 2, 9, 11, 3, 7]
OTHER_TABLE = [0, 1, 4, 6, 8, 10]


@pytest.fixture(scope="module", params=SWEPT, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("model")
    build_reference(request.param, directory)
    return Served(directory)


def rows_of(
    tokens: list[int], first: int, table: list[int], wanted: int | None = None
) -> StepBatch:
    return StepBatch(
        tokens,
        list(range(first, first + len(tokens))),
        [len(tokens)],
        [table],
        [len(tokens) if wanted is None else wanted],
    )


def sweep(
    served: Served, area: SweepArea, tokens: list[int], table: list[int], cuts: list[set[int]]
) -> torch.Tensor:
    """The logits of all rows, each layer computed in parts of its own."""

    async def layers() -> None:
        for layer, inside in zip(range(served.config.num_layers), cuts, strict=False):
            for start, stop in pairwise([0, *sorted(inside), len(tokens)]):
                rows = rows_of(tokens[start:stop], start, table)
                await area.compute(layer, rows, served.moe)

    asyncio.run(layers())
    places = range(len(tokens))
    return served.decoder.logits(
        area.hidden([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in places])
    )


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.sets(st.integers(1, NUM_TOKENS - 1), max_size=9), min_size=3, max_size=3))
def test_any_cut_of_any_layer_gives_the_bits_of_the_stored_path(
    served: Served, cuts: list[set[int]]
) -> None:
    tokens = prompt_of(NUM_TOKENS, seed=1)
    stored = served.forward([(tokens, 0, TABLE)])
    area = SweepArea(served.decoder, num_blocks=12, block_size=BLOCK_SIZE)

    swept = sweep(served, area, tokens, TABLE, cuts)

    assert torch.equal(swept, stored)


def test_what_an_earlier_sweep_left_changes_nothing(served: Served) -> None:
    area = SweepArea(served.decoder, num_blocks=12, block_size=BLOCK_SIZE)
    whole: list[set[int]] = [set()] * 3
    sweep(served, area, prompt_of(NUM_TOKENS, seed=2), TABLE, whole)

    short = prompt_of(20, seed=3)
    swept = sweep(served, area, short, TABLE, whole)

    assert torch.equal(swept, served.forward([(short, 0, TABLE)]))


def test_two_sweeps_at_different_layers_keep_out_of_each_others_way(served: Served) -> None:
    area = SweepArea(served.decoder, num_blocks=12, block_size=BLOCK_SIZE)
    mine, others = prompt_of(NUM_TOKENS, seed=4), prompt_of(NUM_TOKENS, seed=5)

    async def halfway(layer: int) -> None:
        await area.compute(layer, rows_of(mine[:20], 0, TABLE), served.moe)
        for other_layer in range(served.config.num_layers):
            await area.compute(other_layer, rows_of(others, 0, OTHER_TABLE), served.moe)
        await area.compute(layer, rows_of(mine[20:], 20, TABLE), served.moe)

    for layer in range(served.config.num_layers):
        asyncio.run(halfway(layer))

    last = TABLE[-1] * BLOCK_SIZE + (NUM_TOKENS - 1) % BLOCK_SIZE
    assert torch.equal(
        served.decoder.logits(area.hidden([last])), served.forward([(mine, 0, TABLE)])[-1:]
    )


def test_rows_that_nobody_wants_do_not_pass_the_last_layer(served: Served) -> None:
    area = SweepArea(served.decoder, num_blocks=12, block_size=BLOCK_SIZE)
    tokens, passed = prompt_of(NUM_TOKENS, seed=6), []

    async def moe(layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        passed.append((layer, len(hidden_states)))
        return await served.moe(layer, hidden_states)

    async def layers() -> None:
        for layer in range(served.config.num_layers):
            await area.compute(layer, rows_of(tokens[:20], 0, TABLE, wanted=0), moe)
            await area.compute(layer, rows_of(tokens[20:], 20, TABLE, wanted=2), moe)

    asyncio.run(layers())

    last = served.config.num_layers - 1
    sparse = served.config.moe_layers
    assert passed == [(i, n) for i in sparse for n in ((1, 2) if i == last else (20, 25))]
    places = [TABLE[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(NUM_TOKENS)]
    expected = served.forward([(tokens, 0, TABLE)])[-2:]
    assert torch.equal(served.decoder.logits(area.hidden(places[-2:])), expected)


def test_the_area_takes_as_many_bytes_as_its_blocks_are_said_to(served: Served) -> None:
    area = SweepArea(served.decoder, num_blocks=12, block_size=BLOCK_SIZE)

    assert area.nbytes == 12 * SweepArea.block_bytes(served.config, torch.float32, BLOCK_SIZE)
    assert served.decoder.new_kv_cache(12, BLOCK_SIZE).nbytes == (
        12 * BLOCK_SIZE * served.config.kv_width * 4 * served.config.num_layers
    )
