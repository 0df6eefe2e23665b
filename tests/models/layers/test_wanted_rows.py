"""Rows whose logits nobody wants leave before the last layer is done, and nobody else can tell."""

import asyncio
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.parity.cases import CASES, ParityCase, Served, build_reference, prompt_of

BASES = [case for case in CASES if case.name == "base"]
TABLES = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]
NUM_TOKENS = 40


class Watched(Served):
    """Notes how many rows ask for experts, by layer."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked: list[tuple[int, int]] = []
        compute = self.moe

        async def moe(layer: int, hidden_states: Tensor) -> Tensor:
            self.asked.append((layer, len(hidden_states)))
            return await compute(layer, hidden_states)

        self.moe = moe


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_of_every_family_gives_the_bits_that_all_rows_would(
    case: ParityCase, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    a, b = prompt_of(31, seed=1), prompt_of(12, seed=2)
    whole = Served(tmp_path)
    whole_a, whole_b = (whole.forward([(ids, 0, TABLES[i])]) for i, ids in enumerate((a, b)))
    served = Served(tmp_path)

    first = served.forward([(a[:17], 0, TABLES[0]), (b[:5], 0, TABLES[1])], wanted=[0, 2])
    second = served.forward([(b[5:], 5, TABLES[1]), (a[17:30], 17, TABLES[0])], wanted=[7, 1])
    decoded = served.forward([(a[30:], 30, TABLES[0])])

    assert torch.equal(first, whole_b[3:5])
    assert torch.equal(second, torch.cat((whole_b[5:], whole_a[29:30])))
    assert torch.equal(decoded, whole_a[30:])


@pytest.fixture(scope="module", params=BASES, ids=str)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Watched, list[list[int]], list[Tensor]]:
    directory = tmp_path_factory.mktemp("model")
    build_reference(request.param, directory)
    served = Watched(directory)
    prompts = [prompt_of(NUM_TOKENS, seed=seed) for seed in range(3)]
    return served, prompts, [served.forward([(p, 0, TABLES[0])]) for p in prompts]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_rows_of_any_step_may_be_wanted(
    models: tuple[Watched, list[list[int]], list[Tensor]], data: st.DataObject
) -> None:
    served, prompts, expected = models
    done = [0, 0, 0]
    while min(done) < NUM_TOKENS:
        taken = [i for i in range(3) if done[i] < NUM_TOKENS]
        counts = [data.draw(st.integers(1, NUM_TOKENS - done[i])) for i in taken]
        wanted = [data.draw(st.integers(0, count)) for count in counts]
        rows = [
            (prompts[i][done[i] : done[i] + count], done[i], TABLES[i])
            for i, count in zip(taken, counts, strict=True)
        ]
        served.asked.clear()

        logits = served.forward(rows, wanted)

        for i, count in zip(taken, counts, strict=True):
            done[i] += count
        parts = [expected[i][done[i] - few : done[i]] for i, few in zip(taken, wanted, strict=True)]
        assert torch.equal(logits, torch.cat(parts))
        last = served.config.num_layers - 1
        sparse = served.config.moe_layers
        assert served.asked == [
            (layer, sum(counts) if layer < last else max(1, sum(wanted))) for layer in sparse
        ]


def test_every_row_passes_all_layers_where_that_is_asked_for(tmp_path: Path) -> None:
    build_reference(BASES[0], tmp_path)
    served = Watched(tmp_path)
    tokens = prompt_of(9, seed=1)
    expected = served.forward([(tokens, 0, TABLES[0])])
    served.asked.clear()

    batch = served.batch([(tokens, 0, TABLES[0])], wanted=[1])
    logits = asyncio.run(served.decoder.forward(batch, served.cache, served.moe, every_row=True))

    assert torch.equal(logits, expected[-1:])
    assert served.asked == [(layer, 9) for layer in served.config.moe_layers]
