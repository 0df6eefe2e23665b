"""The warm-up of a decoder meets the kernels of later steps, and leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity.cases import CASES, build_reference
from moesaic.dispatch.local import LocalDispatcher
from moesaic.errors import InvalidInput
from moesaic.kernels import attention_pieces
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.sweep_area import SweepArea
from moesaic.models.layers.warm_up import FEW_ROWS, LONG, batches, experts_elsewhere, warm_up
from moesaic.models.weights.checkpoint import Checkpoint

CPU, BLOCK = torch.device("cpu"), 8
SOME = [
    case
    for case in CASES
    if (case.family, case.name)
    in {
        ("mixtral", "sliding window"),
        ("qwen2_moe", "every second layer sparse"),
        ("deepseek_v2", "base"),
        ("gpt_oss", "base"),
    }
]


def decoder_of(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(Checkpoint(directory), load_config(directory), dtype, CPU)


@pytest.mark.parametrize("most_rows", [1, 5, 64, 100])
def test_steps_are_whole_and_within_the_limits(most_rows: int) -> None:
    made = list(batches(most_rows, most_sequences=6, max_positions=40, block_size=BLOCK))

    for batch in made:
        assert sum(batch.sequence_rows) == len(batch.positions) == len(batch.token_ids) <= most_rows
        assert max(batch.positions) < 40
        for table, count in zip(batch.block_tables, batch.sequence_rows, strict=True):
            assert len(table) * BLOCK > max(batch.positions[:count])
    decoded = [len(b.positions) for b in made if set(b.sequence_rows) == {1}]
    assert max(decoded) == min(most_rows, 6)
    assert max(len(b.positions) for b in made) == most_rows


def test_a_context_is_long_enough_to_be_attended_to_in_pieces() -> None:
    kernel = pytest.importorskip("moesaic.kernels.triton.paged_attention")

    assert attention_pieces.most_pieces(LONG, 1024) > 1
    assert FEW_ROWS == kernel.FEW_ROWS


async def test_a_warm_up_changes_nothing_in_the_decoder_or_its_cache(tiny_model: Any) -> None:
    decoder = decoder_of(tiny_model.directory)
    cache = decoder.new_kv_cache(8, BLOCK)
    held = [cache.rows(layer).fill_(0.5).clone() for layer in range(3)]
    batch = StepBatch([5, 6, 7], [0, 1, 2], [3], [[4]], [3])
    expected = await decoder.forward(batch, decoder.new_kv_cache(8, BLOCK), experts_elsewhere)

    await warm_up(decoder, experts_elsewhere, 20, 4, BLOCK)

    assert all(torch.equal(cache.rows(layer), held[layer]) for layer in range(3))
    got = await decoder.forward(batch, decoder.new_kv_cache(8, BLOCK), experts_elsewhere)
    assert torch.equal(got, expected)


async def test_too_little_memory_is_told_with_the_setting_to_change(tiny_model: Any) -> None:
    async def full(layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        if len(hidden_states) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros_like(hidden_states)

    with pytest.raises(InvalidInput, match="lower it") as refused:
        await warm_up(decoder_of(tiny_model.directory), full, 32, 4, BLOCK)

    assert refused.value.field == "--max-num-batched-tokens"


def later_steps() -> list[StepBatch]:
    """Odd sizes of everything: prompts, chunks behind short and long contexts, decoded rows, all at once."""

    def batch(*sequences: tuple[int, int, int]) -> StepBatch:
        """One of each first position, number of rows, and rows that are wanted."""
        positions = [first + i for first, count, _ in sequences for i in range(count)]
        return StepBatch(
            [position % 50 for position in positions],
            positions,
            [count for _, count, _ in sequences],
            [[*range(n, 40), *range(n)] for n in range(len(sequences))],
            [wanted for _, _, wanted in sequences],
        )

    return [
        batch((0, 13, 1)),
        batch((0, 23, 23)),
        batch((3, 5, 0)),
        batch((150, 11, 2), (7, 3, 1)),
        batch((150, 19, 1)),
        batch((0, 1, 1), (199, 1, 1), (30, 1, 1)),
        batch(*[(n, 1, 1) for n in range(7)]),
        batch((170, 1, 1), (0, 9, 1), (60, 1, 1), (63, 2, 2)),
    ]


@pytest.mark.parametrize("launches", [False], indirect=True, ids=["not run"])
@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_later_steps_compile_nothing_more(
    case: Any,
    dtype: torch.dtype,
    tmp_path: Path,
    launches: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moesaic.kernels.attention_pieces.SPLIT", 64)
    monkeypatch.setattr("moesaic.kernels.triton.paged_attention._PIECE_KEYS", 8)
    build_reference(case, tmp_path)
    decoder = decoder_of(tmp_path, dtype)
    local = LocalDispatcher(Checkpoint(tmp_path), decoder.config, dtype, CPU)

    async def moe(layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        return await local.dispatch(local.begin_step(), layer, hidden_states)

    await warm_up(decoder, moe, most_rows=24, most_sequences=7, block_size=BLOCK)
    warmed = set(launches)
    cache, area = decoder.new_kv_cache(40, BLOCK), SweepArea(decoder, 40, BLOCK)
    for batch in later_steps():
        await decoder.forward(batch, cache, moe)
        await decoder.forward(batch, cache, moe, every_row=True)
    for layer in range(decoder.config.num_layers):
        await area.compute(layer, later_steps()[1], moe)

    names = {key.partition(" ")[0] for key in warmed}
    assert {
        "_attend_kernel",
        "_merge_kernel",
        "_add_rms_norm_kernel",
        "_down_kernel",
    } <= names
    assert launches == warmed
