"""Ranks of one attention instance, each with a GPU of its own: the parts that they tell each other are there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.parity.cases import CASES, ParityCase, Served, build_reference, prompt_of
from tests.fake_device.ranks import Threads, served_by_ranks

pytestmark = pytest.mark.suite
RANKS = 2
# Grouped queries with sinks and biases; latents, dense layers and shared experts.
CHOSEN = [c for c in CASES if c.name == "base" and c.family in ("gpt_oss", "deepseek_v3")]


def steps(served: Served) -> Tensor:
    """Return the logits of a prompt, and of a token behind it beside another sequence."""
    tokens = prompt_of(9, seed=1)
    prompt = served.forward([(tokens[:6], 0, [5])], wanted=[2])
    return torch.cat([prompt, served.forward([(tokens[6:7], 6, [5]), (tokens[7:], 0, [3])])]).cpu()


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_ranks_on_gpus_give_what_one_on_a_cpu_gives(case: ParityCase, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    build_reference(case, tmp_path)
    expected = steps(Served(tmp_path))

    with served_by_ranks(tmp_path, RANKS, Threads(RANKS)) as (served, _):
        found = steps(served)

    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
