"""A step in one call against the calls that it is made of: the same bits."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.parity.cases import CASES, CPU, ParityCase, prompt_of
from moesaic.brownout.split import Level
from moesaic.dispatch.local import LocalDispatcher
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint

FP32 = torch.float32
ALL_SPARSE = "mixtral", "qwen3_moe", "olmoe", "granitemoe", "minimax_m2", "gpt_oss"
WHOLE = [case for case in CASES if case.family in ALL_SPARSE and "dense" not in case.name]
WHOLE += [case for case in CASES if case.name == "nothing shared"]
OTHERS = [case for case in CASES if case not in WHOLE]
WHOLE += [
    ParityCase("qwen3_moe", "biased", {"attention_bias": True}),
    ParityCase("qwen3_moe", "one layer", {"num_hidden_layers": 1}),
    # Its keys begin within a panel of what is projected.
    ParityCase("qwen3_moe", "narrow heads", {"head_dim": 10}),
]
NUM_TOKENS, NUM_BLOCKS = 40, 24
Rows = list[tuple[list[int], int, list[int]]]  # token ids, first position, block table


class Both:
    """One model and two caches: whole steps write to one, their pieces to the other."""

    def __init__(
        self,
        directory: Path,
        quantization: Quantization = "none",
        block_size: int = 16,
        dtype: torch.dtype = FP32,
    ) -> None:
        config, checkpoint = load_config(directory), Checkpoint(directory)
        self.decoder = Decoder.load(checkpoint, config, dtype, CPU, quantization)
        self.dispatcher = LocalDispatcher(checkpoint, config, dtype, CPU, quantization)
        self.caches = [self.decoder.new_kv_cache(NUM_BLOCKS, block_size) for _ in range(2)]
        self.whole = self.decoder.whole_steps(self.caches[0], self.dispatcher.kernels)
        self.layers = range(config.num_layers)
        self.degraded = 0

    def degrade(self, substitution: Substitution) -> None:
        """Compute with this substitution from now on."""
        self.dispatcher.adopt(self.dispatcher.substitutions.load(substitution))
        self.whole = self.decoder.whole_steps(self.caches[0], self.dispatcher.kernels)

    def step(
        self, rows: Rows, wanted: list[int] | None = None, levels: tuple[Level, ...] = ()
    ) -> Tensor:
        """The logits, which are the same both ways, as is what the caches have, and what was degraded.

        Rows take turns with ``levels``.
        """
        tokens = [token for ids, _, _ in rows for token in ids]
        positions = [first + i for ids, first, _ in rows for i in range(len(ids))]
        counts = [len(ids) for ids, _, _ in rows]

        def made() -> StepBatch:
            level_of_row = [row % len(levels) for row in range(len(tokens))] if levels else []
            return StepBatch(
                tokens,
                positions,
                counts,
                [table for _, _, table in rows],
                counts if wanted is None else wanted,
                PromisedRows(levels, level_of_row, num_layers=len(self.layers)) if levels else None,
            )

        assert self.whole is not None
        batch, other = made(), made()
        logits = self.whole.forward(batch)
        step = self.dispatcher.begin_step()

        async def moe(layer: int, hidden: Tensor) -> Tensor:
            promised = other.promised_in(len(hidden))
            if promised is not None:
                promised.enter(layer)
            return await self.dispatcher.dispatch(step, layer, hidden, promised)

        pieces = asyncio.run(self.decoder.forward(other, self.caches[1], moe))
        assert torch.equal(logits, pieces)
        if batch.promised is not None and other.promised is not None:
            degraded = batch.promised.settle()
            assert torch.equal(degraded, other.promised.settle())
            self.degraded += int(degraded.sum())
        for layer in self.layers:
            assert torch.equal(*(cache.rows(layer) for cache in self.caches))
        return logits


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("dtype", "quantization", "block_size"),
    [
        (FP32, "none", 8),
        (FP32, "none", 16),
        (FP32, "int8", 8),
        (torch.bfloat16, "none", 16),
        (torch.float16, "none", 16),
        (torch.bfloat16, "int8", 16),
        (torch.bfloat16, "int4", 16),
    ],
)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_one_call_gives_the_bits_of_its_pieces(
    case: ParityCase,
    dtype: torch.dtype,
    quantization: Quantization,
    block_size: int,
    built: Callable[[Any], Path],
) -> None:
    both = Both(built(case), quantization, block_size, dtype)
    a, b, c = (prompt_of(NUM_TOKENS, seed=seed) for seed in range(3))
    tables = [7, 0, 11, 5, 2], [3, 13, 4, 1, 20, 22], [9, 8, 6, 10, 12]

    both.step([(a[:30], 0, tables[0])])
    both.step([(b[:8], 0, tables[1]), (a[30:39], 30, tables[0])], wanted=[0, 3])
    both.step([(c[:5], 0, tables[2]), (b[8:20], 8, tables[1])], wanted=[0, 0])
    both.step([(a[39:], 39, tables[0]), (b[20:21], 20, tables[1]), (c[5:6], 5, tables[2])])
    last = both.step([(b[21:22], 21, tables[1])])

    assert last.shape == (1, 96)


SUBSTITUTIONS = [
    Substitution(way=2, instead="united"),
    Substitution(way=3, instead="united"),
    Substitution(instead="fewer"),
    Substitution(instead="nothing"),
]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("substitution", SUBSTITUTIONS, ids=str)
@pytest.mark.parametrize("case", WHOLE[:2], ids=str)
def test_degraded_steps_have_the_bits_and_counts_of_their_pieces(
    case: ParityCase,
    substitution: Substitution,
    quantization: Quantization,
    built: Callable[[Any], Path],
) -> None:
    both = Both(built(case), quantization)
    a, b = (prompt_of(NUM_TOKENS, seed=seed) for seed in range(2))
    tables = [7, 0, 11], [3, 13, 4]
    both.step([(a[:30], 0, tables[0])])
    both.degrade(substitution)

    both.step([(b[:30], 0, tables[1])], wanted=[2], levels=(Level(0.3),))
    both.step([(a[30:36], 30, tables[0])], wanted=[0], levels=(Level(0.0), Level(0.5, 1)))
    several = (Level(0.1), Level(0.2, 1), Level(0.4))
    both.step([(b[30:], 30, tables[1]), (a[36:], 36, tables[0])], levels=several)
    degraded = both.degraded
    both.step([(b[30:], 30, tables[1])], levels=(Level(1.0),))

    assert 0 < degraded == both.degraded


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_models_with_layers_of_other_kinds_go_piece_by_piece(
    case: ParityCase, built: Callable[[Any], Path]
) -> None:
    assert Both(built(case)).whole is None


@pytest.fixture(scope="module")
def both(built: Callable[[Any], Path]) -> Both:
    return Both(built(next(case for case in WHOLE if case.name == "yarn")))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_steps_of_any_sequences(both: Both, data: st.DataObject) -> None:
    prompts = [prompt_of(NUM_TOKENS, seed=seed) for seed in range(4)]
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    tables = [blocks[i * 6 : i * 6 + data.draw(st.integers(3, 6))] for i in range(4)]
    done = [0, 0, 0, 0]
    while min(done) < NUM_TOKENS:
        left = [i for i in range(4) if done[i] < NUM_TOKENS]
        mine = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = [
            data.draw(
                st.sampled_from([1, 1, 2, 9, 16, NUM_TOKENS]).map(
                    lambda n, i=i: min(n, NUM_TOKENS - done[i])
                )
            )
            for i in mine
        ]
        wanted = [data.draw(st.integers(0, count)) for count in counts]
        rows = [
            (prompts[i][done[i] : done[i] + count], done[i], list(tables[i]))
            for i, count in zip(mine, counts, strict=True)
        ]
        both.step(rows, wanted)
        for i, count in zip(mine, counts, strict=True):
            done[i] += count
