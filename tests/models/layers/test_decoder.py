"""The decoder beyond parity: what it loads, shared blocks, its neighbours' damage, the order of its calls."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity.cases import (
    CASES,
    CPU,
    ParityCase,
    Served,
    build_reference,
    prompt_of,
    reference_logits,
)
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint

BASES = [case for case in CASES if case.name == "base"]


@pytest.fixture(params=BASES, ids=str)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    build_reference(request.param, tmp_path)
    return tmp_path


def test_only_non_expert_weights_are_read(directory: Path) -> None:
    path = directory / "model.safetensors"
    routed = (".experts.", "mlp.gate.", "block_sparse_moe.gate.")
    kept = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not any(part in name for part in routed)
    }
    save_file(kept, path)

    Decoder.load(Checkpoint(directory), load_config(directory), torch.float32, CPU)


def test_sequences_that_share_leading_blocks_read_the_same_prefix(directory: Path) -> None:
    served = Served(directory)
    prefix, a, b = prompt_of(16, seed=1), prompt_of(9, seed=2), prompt_of(1, seed=3)
    served.forward([(prefix, 0, [4, 6])])

    together = served.forward([(a, 16, [4, 6, 8, 9]), (b, 16, [4, 6, 1])])

    alone = Served(directory)
    whole_a = alone.forward([(prefix + a, 0, list(range(4)))])[16:]
    whole_b = alone.forward([(prefix + b, 0, list(range(4)))])[16:]
    torch.testing.assert_close(together, torch.cat((whole_a, whole_b)), atol=1e-4, rtol=0)


def test_damage_in_one_sequence_does_not_reach_its_neighbours(directory: Path) -> None:
    served = Served(directory)
    a, b = prompt_of(30, seed=1), prompt_of(4, seed=2)
    served.forward([(a, 0, [0, 1, 2, 3]), (b, 0, [4])])
    for layer in range(
        served.config.num_layers
    ):  # an overflow, or what an evicted block still holds
        served.cache.rows(layer)[: 4 * served.cache.block_size] = torch.nan

    logits = served.forward([(a[:1], 30, [0, 1, 2, 3]), (b[:1], 4, [4])])

    assert logits[1].isfinite().all()


def test_only_the_wanted_rows_get_logits(directory: Path) -> None:
    served = Served(directory)
    tokens = prompt_of(7, seed=1)
    everything = served.forward([(tokens, 0, [0])])
    batch = StepBatch(tokens, list(range(7)), [7], [[1]], wanted=[2])

    logits = asyncio.run(served.decoder.forward(batch, served.cache, served.moe))

    assert torch.equal(logits, everything[5:])
    assert logits.dtype == torch.float32
    batch.wanted = [0]
    assert asyncio.run(served.decoder.forward(batch, served.cache, served.moe)).shape == (0, 96)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", BASES, ids=str)
def test_weights_of_16_bits_give_the_bits_that_they_give_in_float32(
    case: ParityCase, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    path, prompt = tmp_path / "model.safetensors", prompt_of(20, seed=1)
    stored = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(stored, path)

    wide, held = Served(tmp_path), Served(tmp_path, dtype)

    rows = [(prompt, 0, [0, 1, 2])]
    assert torch.equal(held.forward(rows), wide.forward(rows))
    assert held.cache.rows(0).dtype == torch.float32


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.995), ("int4", 0.85)])
@pytest.mark.parametrize("case", BASES, ids=str)
def test_quantised_models_stay_close_to_float32(
    case: ParityCase, quantization: Any, least: float, tmp_path: Path
) -> None:
    build_reference(case, tmp_path)
    prompt = prompt_of(20, seed=1)
    exact = Served(tmp_path).forward([(prompt, 0, [0, 1, 2])])

    logits = Served(tmp_path, quantization=quantization).forward([(prompt, 0, [0, 1, 2])])

    # Now and then a row takes another expert: most agree closely.
    assert torch.cosine_similarity(logits, exact, dim=-1).median() > least


def test_head_and_embedding_are_quantised(directory: Path) -> None:
    how = (Checkpoint(directory), load_config(directory), torch.float32, CPU)
    exact, ids = Decoder.load(*how), torch.arange(96)
    hidden = torch.randn(9, exact.config.hidden_size, generator=torch.Generator().manual_seed(1))

    decoder = Decoder.load(*how, "int4")

    for one, other in (
        (decoder.embed(ids), exact.embed(ids)),
        (decoder.logits(hidden), exact.logits(hidden)),
    ):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, atol=0.02 * float(other.abs().max()), rtol=0)


def test_routed_experts_are_asked_before_the_shared_expert_is_computed(tmp_path: Path) -> None:
    build_reference(next(case for case in BASES if case.family == "qwen2_moe"), tmp_path)
    served = Served(tmp_path)
    events = []

    def moe(layer: int, hidden_states: Tensor) -> Awaitable[Tensor]:
        events.append(f"asked {layer}")
        before = hidden_states.clone()

        async def answer() -> Tensor:
            assert torch.equal(hidden_states, before)
            events.append(f"awaited {layer}")
            return await served.moe(layer, hidden_states)

        return answer()

    batch = StepBatch([1, 2], [0, 1], [2], [[0]], wanted=[1])
    asyncio.run(served.decoder.forward(batch, served.cache, moe))

    assert events == [f"{what} {layer}" for layer in range(3) for what in ("asked", "awaited")]


def test_a_long_context_with_yarn_equals_the_reference(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "yarn with mscale")
    reference = build_reference(case, tmp_path)
    prompt = prompt_of(200, seed=5)  # past original_max_position_embeddings

    logits = Served(tmp_path).forward([(prompt, 0, list(range(25)))])

    torch.testing.assert_close(logits, reference_logits(reference, prompt), atol=2e-4, rtol=0)
