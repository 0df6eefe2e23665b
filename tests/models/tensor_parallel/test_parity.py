"""Several ranks give what one gives, up to the order of sums in float32."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.common.ranks import Ranks, load_part
from benchmarks.parity.cases import (
    CASES,
    ParityCase,
    Served,
    build_reference,
    prompt_of,
)
from moesaic.errors import UnusableSettings
from moesaic.models.layers.sweep_area import SweepArea
from tests.models.layers.test_parity import preferred
from tests.models.layers.test_sweep_area import OTHER_TABLE, TABLE, sweep

WIDE = ("olmoe", "minimax_m2")  # a norm over all heads together
DIVIDED = [case for case in CASES if case.family not in WIDE]
BASES = [case for case in DIVIDED if case.name == "base"]
QWEN3 = next(case for case in BASES if case.family == "qwen3_moe")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def assert_like_one_rank(ranks: Ranks, case: ParityCase, directory: Path) -> None:
    """Compare two sequences in one step, then the rest of one, of all rows and of the last."""
    build_reference(case, directory)
    alone, prompt = Served(directory), prompt_of(45, seed=3)
    steps = [
        ([(prompt[:20], 0, TABLE), (prompt_of(31, seed=4), 0, OTHER_TABLE)], None),
        ([(prompt[20:], 20, TABLE)], [1]),
        ([(prompt[20:], 20, TABLE)], [0]),
        ([(prompt[20:], 20, TABLE)], None),
    ]

    with ranks.leading(directory) as served:
        found = [served.forward(rows, wanted) for rows, wanted in steps]

    for logits, (rows, wanted) in zip(found, steps, strict=True):
        torch.testing.assert_close(logits, alone.forward(rows, wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", DIVIDED, ids=str)
def test_logits_are_those_of_one_rank(ranks: Ranks, case: ParityCase, tmp_path: Path) -> None:
    assert_like_one_rank(ranks, case, tmp_path)


@pytest.mark.parametrize("case", BASES, ids=str)
def test_four_ranks_may_share_two_key_heads(
    four_ranks: Ranks, case: ParityCase, tmp_path: Path
) -> None:
    assert_like_one_rank(four_ranks, case, tmp_path)


@pytest.mark.parametrize("case", BASES, ids=str)
def test_outputs_of_the_final_norm_are_those_of_transformers(
    ranks: Ranks, case: ParityCase, tmp_path: Path
) -> None:
    model, prompt = build_reference(case, tmp_path), prompt_of(45, seed=6)

    with ranks.leading(tmp_path) as served:
        batch = served.batch([(prompt, 0, TABLE)])
        hidden = asyncio.run(served.decoder.hidden(batch, served.cache, served.moe))
        found = served.decoder.normed(hidden)

    with torch.no_grad():
        expected = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", BASES, ids=str)
def test_greedy_tokens_are_those_of_transformers(
    ranks: Ranks, case: ParityCase, tmp_path: Path
) -> None:
    model, prompt = build_reference(case, tmp_path), prompt_of(9, seed=5)

    with ranks.leading(tmp_path) as served:
        found = served.greedy(prompt, 24)

    assert found == preferred(model, prompt, found)


def test_sweeps_and_copied_blocks_reach_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    build_reference(QWEN3, tmp_path)
    alone, tokens = Served(tmp_path), prompt_of(45, seed=6)
    expected = alone.forward([(tokens, 0, TABLE)])
    copied = [40 + block for block in TABLE]

    with ranks.leading(tmp_path) as served:
        area = SweepArea(served.decoder, num_blocks=12, block_size=8)
        swept = sweep(served, area, tokens, TABLE, [{7, 30}, {20}, set()])
        served.forward([(tokens[:40], 0, TABLE)])
        served.cache.copy_blocks(list(zip(TABLE, copied, strict=True)))
        rest = served.forward([(tokens[40:], 40, copied)])

    torch.testing.assert_close(swept, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rest, expected[40:], rtol=1e-4, atol=1e-4)


def test_caches_that_are_gone_are_forgotten(ranks: Ranks, tmp_path: Path) -> None:
    build_reference(QWEN3, tmp_path)
    alone, tokens = Served(tmp_path), prompt_of(20, seed=7)
    expected = alone.forward([(tokens, 0, TABLE)])

    with ranks.leading(tmp_path) as served:
        for _ in range(40):  # as many plans as are remembered, and more
            served.cache = served.decoder.new_kv_cache(num_blocks=16, block_size=8)
            found = served.forward([(tokens, 0, TABLE)])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", WIDE)
def test_a_norm_over_all_heads_is_refused_by_name(family: str, tmp_path: Path) -> None:
    build_reference(ParityCase(family, "base"), tmp_path)

    with pytest.raises(UnusableSettings, match="a norm over all heads together"):
        load_part(tmp_path, 0, 2)
