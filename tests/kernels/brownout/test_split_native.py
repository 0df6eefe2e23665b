"""Splitting choices on a CPU: compiled and in numpy they come to the same bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from moesaic.brownout import split
from moesaic.brownout.split import Level
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.native import library
from tests.brownout.test_split import batches


def layer_substitution(layer: split.Layer) -> LayerSubstitution:
    given = (layer.lost, bool), (layer.homes, np.int32)
    arrays = (None if each is None else torch.from_numpy(each.astype(kind)) for each, kind in given)
    return LayerSubstitution(layer.num_experts, layer.substitution, *arrays)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.usefixtures("native")
@settings(max_examples=300)
@given(batches(instead=None, may_lose=True))
def test_all_come_to_the_same_bits(compiled, batch) -> None:
    expected = split.split_choices(**batch)
    ids, weights = (torch.from_numpy(batch[name].copy()) for name in ("topk_ids", "topk_weights"))
    promised = PromisedRows(batch["levels"], torch.from_numpy(batch["level_of_row"]))

    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(library, "library", lambda: None)
        split_choices(ids, weights, promised, layer_substitution(batch["layer"]))

    np.testing.assert_array_equal(ids.numpy(), expected.ids)
    assert weights.numpy().tobytes() == expected.weights.tobytes()
    np.testing.assert_array_equal(promised.settle()[0].numpy(), expected.degraded)


def test_counts_of_rows_that_attend_alone_are_theirs() -> None:
    promised = PromisedRows((Level(1.0), Level(0.0)), [0, 1, 1, 0], num_layers=3)
    promised.enter(1).note(torch.tensor([0, 2, 1, 0]))
    last = promised.only([1, 3])
    last.enter(2).note(torch.tensor([1, 0]))

    assert last.level_of_row.tolist() == [1, 0]
    for _ in range(2):
        assert promised.settle().tolist() == [[0, 0, 0, 0], [0, 2, 1, 0], [0, 1, 0, 0]]
