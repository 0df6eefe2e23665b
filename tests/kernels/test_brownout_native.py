"""Splitting choices on a CPU: compiled and in numpy they come to the same bits."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.brownout import split
from moesaic.brownout.split import Instead, Level
from moesaic.kernels.brownout import KEPT, PromisedRows, Promises, split_choices
from moesaic.native import library
from tests.brownout.test_split import batches


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.usefixtures("native")
@settings(max_examples=300)
@given(batches(), st.sampled_from(get_args(Instead)))
def test_all_come_to_the_same_bits(compiled, batch, instead) -> None:
    expected = split.split_choices(**batch, instead=instead)
    ids, weights = (torch.from_numpy(batch[name].copy()) for name in ("topk_ids", "topk_weights"))
    promises = Promises(tuple(batch["levels"]), batch["way"], instead)
    promised = PromisedRows(promises, batch["level_of_row"].tolist())

    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(library, "library", lambda: None)
        split_choices(ids, weights, promised, batch["num_experts"])

    np.testing.assert_array_equal(ids.numpy(), expected.ids)
    assert weights.numpy().tobytes() == expected.weights.tobytes()
    np.testing.assert_array_equal(promised.settle().numpy(), expected.degraded)


def test_counts_of_rows_that_attend_alone_are_theirs() -> None:
    promised = PromisedRows(Promises((KEPT, Level(0.0)), 2), [0, 1, 1, 0])
    promised.degraded += torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    last = promised.only([1, 3])
    last.degraded += torch.tensor([1, 0], dtype=torch.int32)

    assert last.level_of_row.tolist() == [1, 0]
    assert promised.settle().tolist() == [0, 3, 1, 0]
    assert promised.settle().tolist() == [0, 3, 1, 0]
