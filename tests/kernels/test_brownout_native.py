"""Splitting choices on a CPU: compiled and in numpy they come to the same bits."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.brownout import split
from moesaic.brownout.split import Instead
from moesaic.kernels.brownout import Promises, split_choices
from moesaic.native import library
from tests.brownout.test_split import batches


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.usefixtures("native")
@settings(max_examples=300)
@given(batches(), st.sampled_from(get_args(Instead)))
def test_all_come_to_the_same_bits(compiled, batch, instead) -> None:
    expected = split.split_choices(**batch, instead=instead)
    ids, weights = (torch.from_numpy(batch[name].copy()) for name in ("topk_ids", "topk_weights"))
    rows = torch.from_numpy(batch["level_of_row"])
    promises = Promises(tuple(batch["levels"]), rows, batch["way"], instead)

    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(library, "library", lambda: None)
        degraded = split_choices(ids, weights, promises, batch["num_experts"])

    np.testing.assert_array_equal(ids.numpy(), expected.ids)
    assert weights.numpy().tobytes() == expected.weights.tobytes()
    np.testing.assert_array_equal(degraded.numpy(), expected.degraded)


@pytest.mark.usefixtures("native")
@given(batches())
def test_where_all_rows_are_alike_their_levels_need_not_be_said(batch) -> None:
    levels = tuple(batch["levels"][:1])
    alike = torch.zeros(len(batch["topk_ids"]), dtype=torch.uint8)
    results = []
    for rows in (alike, None):
        ids, weights = (torch.from_numpy(batch[n].copy()) for n in ("topk_ids", "topk_weights"))
        split_choices(ids, weights, Promises(levels, rows, batch["way"]), batch["num_experts"])
        results.append((ids, weights))

    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
