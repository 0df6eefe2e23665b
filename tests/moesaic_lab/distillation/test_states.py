"""Rows layer by layer equal those of whole forward passes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.parity.cases import ParityCase, Served
from moesaic.models.layers.decoder import Decoder
from moesaic_lab.distillation import states
from moesaic_lab.distillation.states import LayerByLayer
from moesaic_lab.distillation.texts import LearningText
from tests.moesaic_lab.distillation.conftest import VARIED, Model


@pytest.mark.parametrize("case", VARIED, ids=str)
def test_rows_are_what_the_experts_of_a_forward_pass_see(
    case: ParityCase,
    varied: Callable[[ParityCase], Model],
    text: LearningText,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, config = varied(case)
    sequences = [own.tokens for own in text.train[:12]]
    monkeypatch.setattr(states, "MOST_ROWS", 64)  # several batches

    passing = LayerByLayer(checkpoint, _decoder(checkpoint, config), sequences, tmp_path)
    found = {}
    for layer in range(config.num_layers):
        rows = passing.pass_layer(layer)
        if rows is not None:
            found[layer] = np.array(rows.inputs), rows.ids.copy(), rows.weights.copy()

    assert list(found) == list(config.moe_layers)
    served = Served(checkpoint.directory)
    seen: dict[int, list[Tensor]] = {layer: [] for layer in config.moe_layers}
    moe = served.moe

    async def watched(layer: int, hidden_states: Tensor) -> Tensor:
        seen[layer].append(hidden_states.clone())
        return await moe(layer, hidden_states)

    served.moe = watched
    for sequence in sequences:
        served.forward([(sequence, 0, list(range(8)))])
    for layer, (inputs, ids, weights) in found.items():
        torch.testing.assert_close(
            torch.from_numpy(inputs), torch.cat(seen[layer]), atol=1e-5, rtol=1e-5
        )
        assert ids.shape == weights.shape == (len(inputs), config.moe.top_k)


def test_files_hold_two_numbers_for_each_of_a_rows(
    small: Model, text: LearningText, tmp_path: Path
) -> None:
    checkpoint, config = small
    sequences = [own.tokens for own in text.train]

    passing = LayerByLayer(checkpoint, _decoder(checkpoint, config), sequences, tmp_path)
    passing.pass_layer(0)

    row_bytes = 4 * config.hidden_size
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    num_rows = sum(map(len, sequences))
    assert sizes == {"hidden.f32": row_bytes * num_rows, "inputs.f32": row_bytes * num_rows}


def _decoder(checkpoint, config) -> Decoder:
    return Decoder.load(checkpoint, config, torch.float32, torch.device("cpu"))
