"""A layer's attention in one call against the calls that it is made of: the same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.cases import CASES, ParityCase, Served, prompt_of
from moesaic.kernels.held_bytes import Quantization

pytestmark = pytest.mark.usefixtures("native")
GROUPED = [case for case in CASES if not case.family.startswith("deepseek")]


@pytest.mark.parametrize(("block_size", "threads"), [(8, 1), (16, 2)])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_one_call_gives_the_bits_of_its_pieces(
    case: ParityCase,
    quantization: Quantization,
    block_size: int,
    threads: int,
    built: Callable[[Any], Path],
) -> None:
    torch.set_num_threads(threads)
    served = Served(built(case), quantization=quantization)
    a, b = prompt_of(40, seed=1), prompt_of(9, seed=2)
    tables = [7, 0, 11, 5, 2, 9], [3, 13]
    layers = served.decoder.layers
    assert all(layer.fused is not None for layer in layers)
    logits, kept = [], []
    for passed in (layers, [replace(layer, fused=None) for layer in layers]):
        served.decoder.layers = passed
        served.cache = served.decoder.new_kv_cache(num_blocks=24, block_size=block_size)
        logits.append(
            torch.cat(
                [
                    served.forward([(a[:30], 0, tables[0])]),
                    served.forward([(b[:8], 0, tables[1]), (a[30:39], 30, tables[0])]),
                    served.forward([(a[39:], 39, tables[0]), (b[8:], 8, tables[1])]),
                ]
            )
        )
        kept.append(torch.stack([served.cache.rows(layer) for layer in range(len(layers))]))

    assert torch.equal(*logits)
    assert torch.equal(*kept)
