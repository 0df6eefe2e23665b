"""Noting what gates choose beside whatever serves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.tracing import ChosenExperts, StepTracer
from moesaic.errors import ExpertUnavailable
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import Gate, load_gates
from moesaic.models.weights.checkpoint import Checkpoint


@pytest.fixture
def gates(tiny_model: Any) -> dict[int, Gate]:
    config, checkpoint = load_config(tiny_model.directory), Checkpoint(tiny_model.directory)
    return load_gates(checkpoint, config, torch.float32, torch.device("cpu"))


async def doubled(layer: int, hidden_states: Tensor) -> Tensor:
    return 2 * hidden_states


async def test_a_step_is_told_once_with_what_each_layer_chose(gates: dict[int, Gate]) -> None:
    told: list[ChosenExperts] = []
    hidden = {layer: torch.randn(5, 32) for layer in gates}

    moe = StepTracer(gates, told.append).watching([3, 1, 1], doubled)
    for layer in gates:
        torch.testing.assert_close(await moe(layer, hidden[layer]), 2 * hidden[layer])

    (step,) = told
    assert step.decode_rows == 2
    expected = torch.stack([gates[layer](hidden[layer])[1] for layer in gates])
    assert torch.equal(step.topk_ids, expected)


async def test_batches_that_run_side_by_side_are_told_apart(gates: dict[int, Gate]) -> None:
    told: list[ChosenExperts] = []
    tracer = StepTracer(gates, told.append)

    one, other = tracer.watching([1], doubled), tracer.watching([2], doubled)
    for layer in gates:
        await one(layer, torch.randn(1, 32))
        await other(layer, torch.randn(2, 32))

    assert [step.topk_ids.shape[1] for step in told] == [1, 2]


async def test_a_step_that_fails_or_computes_some_layers_only_is_not_told(
    gates: dict[int, Gate],
) -> None:
    told: list[ChosenExperts] = []
    tracer, last = StepTracer(gates, told.append), max(gates)

    async def failing(layer: int, hidden_states: Tensor) -> Tensor:
        if layer == last:
            raise ExpertUnavailable(layer)
        return hidden_states

    moe = tracer.watching([4], failing)
    for layer in sorted(gates)[:-1]:
        await moe(layer, torch.randn(4, 32))
    with pytest.raises(ExpertUnavailable):
        await moe(last, torch.randn(4, 32))
    await tracer.watching([4], doubled)(last, torch.randn(4, 32))

    assert told == []
