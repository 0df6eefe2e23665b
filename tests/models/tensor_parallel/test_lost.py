"""A rank that is killed ends its instance: nobody waits for it."""

from pathlib import Path

import pytest

from benchmarks.common.ranks import Ranks
from benchmarks.parity.cases import CASES, build_reference, prompt_of
from tests.models.layers.test_sweep_area import TABLE

ROWS = [(prompt_of(9, seed=1), 0, TABLE)]


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_instance_ends_with_any_of_its_ranks(number: int, tmp_path: Path) -> None:
    build_reference(CASES[0], tmp_path)
    ranks = Ranks(number)
    with ranks.leading(tmp_path) as served:
        served.forward(ROWS)
        ranks.processes[0].kill()
        ranks.processes[0].join(20)
        with pytest.raises(RuntimeError):
            served.forward(ROWS)
    ranks.close()
