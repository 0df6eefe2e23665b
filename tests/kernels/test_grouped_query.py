"""A layer's attention in one call against the calls that it is made of: the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.parity.cases import CASES, CPU, ParityCase, Served, build_reference, prompt_of
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("native")
GROUPED = [case for case in CASES if not case.family.startswith("deepseek")]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_one_call_gives_the_bits_of_its_pieces(
    case: ParityCase, quantization: Quantization, block_size: int, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    a, b = prompt_of(40, seed=1), prompt_of(9, seed=2)
    logits, kept = [], []
    for whole in (True, False):
        served = Served(tmp_path)
        decoder = Decoder.load(
            Checkpoint(tmp_path), served.config, torch.float32, CPU, quantization
        )
        assert all(layer.fused is not None for layer in decoder.layers)
        if not whole:
            decoder.layers = [replace(layer, fused=None) for layer in decoder.layers]
        served.decoder = decoder
        served.cache = decoder.new_kv_cache(num_blocks=24, block_size=block_size)
        tables = [7, 0, 11, 5, 2, 9], [3, 13]
        logits.append(
            torch.cat(
                [
                    served.forward([(a[:30], 0, tables[0])]),
                    served.forward([(b[:8], 0, tables[1]), (a[30:39], 30, tables[0])]),
                    served.forward([(a[39:], 39, tables[0]), (b[8:], 8, tables[1])]),
                ]
            )
        )
        layers = range(served.config.num_layers)
        kept.append(torch.stack([served.cache.rows(layer) for layer in layers]))

    assert torch.equal(*logits)
    assert torch.equal(*kept)
