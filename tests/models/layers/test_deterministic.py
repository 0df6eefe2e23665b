"""In float32 on a CPU no bit of a row's logits depends on how its sequence was cut or what ran beside it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.parity.cases import CASES, Served, build_reference, prompt_of, reference_logits

BASES = [case for case in CASES if case.name == "base"]
NUM_TOKENS = 45
TABLE = [5, 2, 9, 11, 3, 7]
OTHERS = [20 + i for i in range(40)]


@pytest.fixture(scope="module", params=BASES, ids=str)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Served, torch.Tensor]:
    directory = tmp_path_factory.mktemp("model")
    reference = build_reference(request.param, directory)
    expected = reference_logits(reference, prompt_of(NUM_TOKENS, seed=1))
    return Served(directory), expected


@settings(max_examples=8, deadline=None)
@given(
    cuts=st.sets(st.integers(1, NUM_TOKENS - 1), max_size=12),
    neighbours=st.lists(st.integers(1, 30), max_size=3),
    seed=st.integers(0, 1000),
)
def test_any_cut_and_any_neighbours_give_the_same_bits(
    served: tuple[Served, torch.Tensor], cuts: set[int], neighbours: list[int], seed: int
) -> None:
    model, expected = served
    tokens = prompt_of(NUM_TOKENS, seed=1)
    whole = model.forward([(tokens, 0, TABLE)])
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=1e-4)

    bounds, parts = [0, *sorted(cuts), NUM_TOKENS], []
    for start, stop in pairwise(bounds):
        rows = [(tokens[start:stop], start, TABLE)]
        for i, length in enumerate(neighbours):
            at = (seed + i) % (len(rows) + 1)
            rows.insert(at, (prompt_of(length, seed=seed + i), 0, OTHERS[i * 8 : i * 8 + 8]))
        before = 0
        for ids, _, table in rows:
            if table is TABLE:
                break
            before += len(ids)
        parts.append(model.forward(rows)[before : before + stop - start])

    assert torch.equal(torch.cat(parts), whole)
