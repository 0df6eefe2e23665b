"""Several ranks give what one gives, up to the order of sums in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.parity.cases import CASES, Served, build_reference, prompt_of
from tests.models.layers.test_sweep_area import OTHER_TABLE, TABLE
from tests.models.tensor_parallel.ranks import Ranks


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_one_rank(ranks: Ranks, case: object, tmp_path: Path) -> None:
    build_reference(case, tmp_path)
    alone, prompt = Served(tmp_path), prompt_of(45, seed=3)
    cut = [([*prompt[:20]], 0, TABLE), (prompt_of(31, seed=4), 0, OTHER_TABLE)]
    rest = [(prompt[20:], 20, TABLE)]

    with ranks.leading(tmp_path) as served:
        found = [served.forward(cut), served.forward(rest, [1]), served.forward(rest)]

    for logits, expected in zip(
        found, [alone.forward(cut), alone.forward(rest, [1]), alone.forward(rest)], strict=True
    ):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
