"""Captured steps of several ranks, each with a fake GPU of its own: all ranks launch the same graphs, or none."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.parity.cases import CASES, ParityCase, Served, build_reference, prompt_of
from moesaic.brownout.split import Level
from moesaic.errors import ExpertUnavailable, InUse, UnusableSettings
from moesaic.kernels.promised import PromisedRows
from moesaic.models.layers import decode_segments
from moesaic.models.layers.decode_graphs import DecodeGraphs
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.static_decode import DecodeShapes
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.tensor_parallel import followed_steps
from moesaic.models.tensor_parallel.followed_steps import FollowedSteps
from moesaic.models.tensor_parallel.programs import RanksDiffer
from tests.fake_device.ranks import Threads, served_by_ranks
from tests.kernels.played_graphs import played_graphs
from tests.kernels.test_whole_models import decode_batch

pytestmark = pytest.mark.suite  # whole models in the interpreter, once for each rank
# Grouped queries with sinks and biases; latents, dense layers and shared experts.
GROUPED, LATENT = (
    next(c for c in CASES if c.name == "base" and c.family == family)
    for family in ("gpt_oss", "deepseek_v3")
)
TABLES = [[5, 6], [3, 9]]
PROMPTS = [prompt_of(6, seed=1), prompt_of(3, seed=2)]
# Steps of one row and of two, as large as they are captured: the same bits as kernel by kernel.
COUNTS = (2, 1, 2)


def prefilled(served: Served) -> KVCache:
    """Compute the prompts in the cache of ``served``, and in another one, which is returned."""
    mine, other = served.cache, served.decoder.new_kv_cache(16, served.cache.block_size)
    for served.cache in (other, mine):
        served.forward([(p, 0, t) for p, t in zip(PROMPTS, TABLES, strict=True)])
    return other


def decode_steps() -> list[StepBatch]:
    return [
        decode_batch(
            [
                (token, len(prompt) + step, table)
                for token, prompt, table in zip(
                    prompt_of(count, seed=step), PROMPTS, TABLES, strict=False
                )
            ]
        )
        for step, count in enumerate(COUNTS)
    ]


def kernel_by_kernel(served: Served, cache: KVCache, batch: StepBatch) -> Tensor:
    return asyncio.run(served.decoder.forward(batch, cache, served.moe)).cpu()


def assert_same_rows(cache: KVCache, other: KVCache, num_layers: int) -> None:
    written = [table[0] * cache.block_size + at for table in TABLES for at in range(3, 6)]
    for layer in range(num_layers):
        assert torch.equal(cache.rows(layer).cpu()[written], other.rows(layer).cpu()[written])


@pytest.mark.parametrize(("case", "ranks"), [(GROUPED, 2), (LATENT, 4)], ids=str)
def test_whole_steps_of_several_ranks_have_the_bits_of_eager_ones(
    case: ParityCase, ranks: int, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    threads = Threads(ranks)
    with served_by_ranks(tmp_path, ranks, threads, played_graphs) as (served, experts):
        eager = prefilled(served)
        moe = partial(experts.dispatch, experts.begin_step())
        graphs = DecodeGraphs(served.decoder, served.cache, moe, max_rows=2, max_length=16)
        for batch in decode_steps():
            assert graphs.takes(batch)
            got = graphs.forward(batch).cpu()
            assert torch.equal(got, kernel_by_kernel(served, eager, batch))
        assert_same_rows(served.cache, eager, served.config.num_layers)
    assert threads.found == []


@pytest.mark.parametrize(("case", "ranks"), [(GROUPED, 4), (LATENT, 2)], ids=str)
def test_segments_of_several_ranks_have_the_bits_of_eager_steps_behind_lost_experts_too(
    case: ParityCase, ranks: int, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    threads = Threads(ranks)
    with served_by_ranks(tmp_path, ranks, threads, played_graphs) as (served, _):
        eager = prefilled(served)
        segments = DecodeSegments(served.decoder, served.cache, max_rows=2, max_length=16)
        _, *rest = served.config.moe_layers

        async def lost(layer: int, hidden_states: Tensor) -> Tensor:
            if layer in rest:
                raise ExpertUnavailable(layer)
            return await served.moe(layer, hidden_states)

        for turn, batch in enumerate(decode_steps()):
            if turn == 1:
                with pytest.raises(ExpertUnavailable):
                    asyncio.run(segments.forward(batch, lost))
            got = asyncio.run(segments.forward(batch, served.moe)).cpu()
            assert torch.equal(got, kernel_by_kernel(served, eager, batch))
        assert_same_rows(served.cache, eager, served.config.num_layers)
    assert threads.found == []


def test_degraded_steps_of_several_ranks_go_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_reference(GROUPED, tmp_path)
    batch, degraded = decode_steps()[1], decode_steps()[1]
    degraded.promised = PromisedRows((Level(0.5, 1),), [0], num_layers=2)
    with served_by_ranks(tmp_path, 2, Threads(2), played_graphs) as (served, experts):
        # Nothing is computed: what a step may be is decided by its rows.
        monkeypatch.setattr(DecodeGraphs, "_captured", lambda *_: None)
        monkeypatch.setattr(FollowedSteps, "capture", lambda *_: None)
        moe = partial(experts.dispatch, experts.begin_step())
        graphs = DecodeGraphs(served.decoder, served.cache, moe, max_rows=1, max_length=16)
        degrading = graphs.degrading(partial(experts.dispatch, experts.begin_step()))

        assert degrading.takes(batch)
        assert not degrading.takes(degraded)


def test_ranks_that_would_capture_other_steps_are_found_before_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_reference(GROUPED, tmp_path)
    monkeypatch.setattr(followed_steps, "described", lambda *_: "steps of another version")
    threads = Threads(2)
    with (
        served_by_ranks(tmp_path, 2, threads, played_graphs) as (served, _),
        pytest.raises(UnusableSettings, match="ranks would capture different steps"),
    ):
        DecodeSegments(served.decoder, served.cache, max_rows=2, max_length=16)
    assert threads.found == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_a_capture_names_the_setting(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_reference(GROUPED, tmp_path)

    def refused(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    module = followed_steps if rank else decode_segments
    monkeypatch.setattr(module, "compile_kernels", refused)
    threads = Threads(2)
    with (
        served_by_ranks(tmp_path, 2, threads, played_graphs) as (served, _),
        pytest.raises(InUse if rank == 0 else RuntimeError) as first,
    ):
        DecodeSegments(served.decoder, served.cache, max_rows=2, max_length=16)

    error = threads.found[0] if rank else first.value
    assert str(error).startswith("--max-num-seqs: a captured step of 2 rows does not fit")


def test_a_rank_that_would_choose_another_graph_ends_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_reference(GROUPED, tmp_path)
    threads = Threads(2)
    with served_by_ranks(tmp_path, 2, threads, played_graphs) as (served, experts):
        moe = partial(experts.dispatch, experts.begin_step())
        graphs = DecodeGraphs(served.decoder, served.cache, moe, max_rows=2, max_length=16)
        monkeypatch.setattr(DecodeShapes, "size_of", lambda shapes, _: shapes.sizes[-1])
        with pytest.raises(RuntimeError, match="connection closed"):
            graphs.forward(decode_steps()[1])

    [error] = threads.found
    assert isinstance(error, RanksDiffer)
    assert "rank 0 computes 1 rows by a graph of 2; rank 1 takes 1" in str(error)
