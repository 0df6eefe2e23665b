"""Captured steps read and write only what stays where it is: exact ones and degraded ones."""

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.parity.cases import CASES, ParityCase, build_reference, prompt_of
from moesaic.brownout.split import Level
from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.shortcuts import LocalSteps
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.captured import decode_sizes
from moesaic.models.layers import decode_graphs
from moesaic.models.layers.decode_graphs import DecodeGraphs
from moesaic.models.layers.decoder import MoELayer
from moesaic.models.layers.rope import RotaryEmbedding
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint
from tests.kernels.played_graphs import played_graphs
from tests.kernels.test_whole_models import decode_batch, served_on
from tests.kernels.ways_of_a_gpu import take_the_ways_of_a_gpu

BASES = [case for case in CASES if case.name == "base"]
TABLES = [[9, 8, 7, 6, 5], [2, 0, 1, 3, 4], [10, 11, 12, 13, 14]]
SUBSTITUTIONS = [Substitution(way=2, instead="united"), Substitution(instead="fewer")]
LEVELS = [
    (),
    (Level(0.3, 1),),
    (Level(0.0, 1), Level(0.6, 1)),
    (),
    (Level(0.2, 1), Level(1.0, 4), Level(0.5, 3)),
    (Level(1.0, 1), Level(0.0, 3)),
]


def promised_batch(
    rows: list[tuple[int, int, list[int]]], levels: tuple[Level, ...], num_layers: int
) -> StepBatch:
    """A decode step whose rows take turns with ``levels``; none: they are promised everything."""
    batch = decode_batch(rows)
    if levels:
        level_of_row = [row % len(levels) for row in range(len(rows))]
        batch.promised = PromisedRows(levels, level_of_row, num_layers=num_layers)
    return batch


def experts_of(dispatcher: LocalDispatcher, step: Step, batch: StepBatch) -> MoELayer:
    def moe(layer: int, hidden: Tensor) -> Awaitable[Tensor]:
        promised = batch.promised and batch.promised.enter(layer)
        return dispatcher.dispatch(step, layer, hidden, promised)

    return moe


def counted(batch: StepBatch) -> list[list[int]]:
    return [] if batch.promised is None else batch.promised.settle().tolist()


@pytest.mark.suite  # a whole model in the interpreter
@pytest.mark.parametrize("case", BASES[1::3], ids=str)
def test_degraded_and_exact_steps_take_turns_in_captured_form(
    case: ParityCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("graphs are captured here, not played")
    take_the_ways_of_a_gpu(monkeypatch)
    build_reference(case, tmp_path)
    cpu = torch.device("cpu")
    whole, cut = (served_on(tmp_path, torch.float32, cpu) for _ in range(2))
    prompts = [prompt_of(length, seed=length) for length in (9, 5, 1)]
    for served in (whole, cut):
        served.forward([(p, 0, t) for p, t in zip(prompts, TABLES, strict=True)])
    config = whole.config
    dispatcher = LocalDispatcher(Checkpoint(tmp_path), config, torch.float32, cpu)
    monkeypatch.setattr(RotaryEmbedding, "rotation", RotaryEmbedding.compute)  # as on a GPU
    monkeypatch.setattr(decode_graphs, "compile_kernels", lambda device, compute: None)

    with played_graphs() as pools:
        exact = dispatcher.begin_step()
        graphs = DecodeGraphs(cut.decoder, cut.cache, partial(dispatcher.dispatch, exact), 3, 40)
        assert pools == [None, *["pool"] * (len(decode_sizes(3)) - 1)]
        steps = LocalSteps(lambda step: graphs.degrading(partial(dispatcher.dispatch, step)))
        degraded = 0
        for substitution in SUBSTITUTIONS:
            dispatcher.adopt(dispatcher.substitutions.load(substitution))
            step: Step = dispatcher.begin_step()
            for turn, levels in enumerate(LEVELS):
                count = 3 - turn % 3
                tokens = prompt_of(count, seed=turn)
                rows = [
                    (t, len(p), table) for t, p, table in zip(tokens, prompts, TABLES, strict=False)
                ]
                one, other = (promised_batch(rows, levels, config.num_layers) for _ in range(2))
                got = asyncio.run(steps.forward(step, [one]))
                moe = experts_of(dispatcher, step, other)
                expected = asyncio.run(whole.decoder.forward(other, whole.cache, moe))
                assert got is not None
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
                found = counted(one)
                assert found == counted(other)
                degraded += sum(map(sum, found))
                for prompt, token in zip(prompts, tokens, strict=False):
                    prompt.append(token)
    assert degraded > 0
    for layer in range(config.num_layers):
        torch.testing.assert_close(
            cut.cache.rows(layer), whole.cache.rows(layer), atol=1e-5, rtol=0
        )


def test_steps_of_more_levels_than_are_captured_go_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("graphs are captured here, not played")
    take_the_ways_of_a_gpu(monkeypatch)
    monkeypatch.setattr(RotaryEmbedding, "rotation", RotaryEmbedding.compute)  # as on a GPU
    build_reference(BASES[0], tmp_path)
    served = served_on(tmp_path, torch.float32, torch.device("cpu"))
    with played_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_graphs, "compile_kernels", lambda device, compute: None)
        graphs = DecodeGraphs(served.decoder, served.cache, served.moe, 1, 16)
    levels = tuple(Level(i / 100, i) for i in range(17))
    few, many = (
        promised_batch([(1, 3, TABLES[0])], levels[:count], served.config.num_layers)
        for count in (16, 17)
    )
    degrading = graphs.degrading(lambda layer, hidden, promised: served.moe(layer, hidden))

    assert not graphs.takes(few)
    assert degrading.takes(few)
    assert not degrading.takes(many)


def test_degraded_steps_that_no_memory_is_left_to_capture_go_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("graphs are captured here, not played")
    take_the_ways_of_a_gpu(monkeypatch)
    monkeypatch.setattr(RotaryEmbedding, "rotation", RotaryEmbedding.compute)  # as on a GPU
    build_reference(BASES[0], tmp_path)
    served = served_on(tmp_path, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(decode_graphs, "compile_kernels", lambda device, compute: None)
    with played_graphs():
        graphs = DecodeGraphs(served.decoder, served.cache, served.moe, 1, 16)
        batch = promised_batch([(1, 3, TABLES[0])], (Level(0.5, 1),), served.config.num_layers)

        def full(layer: int, hidden: Tensor, promised: PromisedRows) -> Awaitable[Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory")

        degrading = graphs.degrading(full)
        assert degrading.takes(batch)
        with pytest.raises(torch.OutOfMemoryError):
            degrading.forward(batch)

    assert not degrading.takes(batch)
    assert degrading.takes(decode_batch([(1, 3, TABLES[0])]))
    assert graphs.degrading(full).takes(batch)
