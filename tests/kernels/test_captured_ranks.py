"""Captured steps of two ranks by NCCL, on a GPU each, against eager ones of the same ranks."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.common.ranks import Ranks
from benchmarks.parity.cases import CASES, ParityCase, build_reference, prompt_of
from moesaic.dispatch.local import LocalDispatcher
from moesaic.models.layers.decode_graphs import DecodeGraphs
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.weights.checkpoint import Checkpoint
from tests.kernels.test_whole_models import decode_batch

pytestmark = pytest.mark.gpu
# Grouped queries with sinks and biases; latents, dense layers and shared experts.
CHOSEN = [c for c in CASES if c.name == "base" and c.family in ("gpt_oss", "deepseek_v3")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: a rank has one of its own")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in segments"])
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_captured_steps_of_two_gpus_equal_eager_ones(
    case: ParityCase, whole: bool, ranks: Ranks, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    tables = [[9, 8, 7, 6, 5], [2, 0, 1, 3, 4], [10, 11, 12, 13, 14]]
    prompts = [prompt_of(length, seed=length) for length in (9, 25, 1)]
    with ranks.leading(tmp_path) as served:
        decoder, cache = served.decoder, served.cache
        eager = decoder.new_kv_cache(cache.num_blocks, cache.block_size)
        experts = LocalDispatcher(
            Checkpoint(tmp_path), served.config, torch.float32, decoder.device
        )
        served.moe = moe = partial(experts.dispatch, experts.begin_step())
        for served.cache in (cache, eager):
            served.forward([(p, 0, t) for p, t in zip(prompts, tables, strict=True)])
        graphs = DecodeGraphs(decoder, cache, moe, 3, 64) if whole else None
        segments = None if whole else DecodeSegments(decoder, cache, 3, 64)
        for step in range(12):
            tokens = prompt_of(1 + step % 3, seed=step)
            rows = [
                (t, len(p), table) for t, p, table in zip(tokens, prompts, tables, strict=False)
            ]
            batch = decode_batch(rows)
            if graphs:
                got = graphs.forward(batch)
            else:
                assert segments
                got = asyncio.run(segments.forward(batch, moe))
            expected = served.forward([([t], at, table) for t, at, table in rows])
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            for prompt, token in zip(prompts, tokens, strict=False):
                prompt.append(token)
