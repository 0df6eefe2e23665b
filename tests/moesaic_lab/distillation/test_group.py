"""One united expert: training brings something, and alike experts lose nothing."""

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic_lab.distillation.group import Group, busiest_units, distil, mean_of, mlp
from moesaic_lab.distillation.recipe import Recipe

WIDTH, SIZE = 12, 8


def experts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 2 * SIZE, WIDTH, generator=generator) * WIDTH**-0.5,
        torch.randn(count, WIDTH, SIZE, generator=generator) * SIZE**-0.5,
    )


def group_of(gate_up: Tensor, down: Tensor, num_rows: int, seed: int) -> Group:
    """Rows that chose one or more of the experts, of as many others."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((2 * num_rows, WIDTH), dtype=np.float32)
    weights = rng.random((num_rows, len(gate_up)), dtype=np.float32)
    weights[rng.random(weights.shape) < 0.5] = 0
    weights[np.arange(num_rows), rng.integers(0, len(gate_up), num_rows)] += 0.1
    rows = np.sort(rng.choice(2 * num_rows, num_rows, replace=False))
    return Group(gate_up, down, inputs, rows, torch.from_numpy(weights))


@pytest.mark.parametrize("way", [2, 3])
def test_training_brings_less_error_than_the_mean(way: int) -> None:
    own = experts(way, seed=way)
    train, held_out = group_of(*own, 2000, seed=1), group_of(*own, 300, seed=2)

    united = distil(train, held_out, Recipe(steps=150), seed=3, dtype=torch.float32)

    begun = min(held_out.relative_error(*make(train)) for make in (mean_of, busiest_units))
    assert united.error < 0.9 * begun
    assert united.mean_error == held_out.relative_error(*mean_of(train))


def test_alike_experts_are_one() -> None:
    gate_up, down = (part.expand(4, -1, -1) for part in experts(1, seed=0))
    train, held_out = group_of(gate_up, down, 200, seed=1), group_of(gate_up, down, 50, seed=2)

    united = distil(train, held_out, Recipe(steps=3), seed=3, dtype=torch.float32)

    assert united.error < 1e-12
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(mlp(x, united.gate_up, united.down), mlp(x, gate_up[0], down[0]))


def test_an_error_is_of_the_weights_as_they_are_stored() -> None:
    own = experts(2, seed=5)
    train, held_out = group_of(*own, 200, seed=1), group_of(*own, 50, seed=2)

    united = distil(train, held_out, Recipe(steps=5), seed=3, dtype=torch.bfloat16)

    assert united.gate_up.dtype == united.down.dtype == torch.bfloat16
    stored = united.gate_up.float(), united.down.float()
    assert united.error == held_out.relative_error(*stored)


def test_what_experts_say_is_weighted_by_the_gate() -> None:
    group = group_of(*experts(3, seed=6), 40, seed=1)
    some = torch.tensor([7, 0, 39])

    said = group.said(group.inputs_of(some), group.weights[some])

    for row, index in enumerate(some.tolist()):
        x = torch.from_numpy(group.inputs[group.rows[index]])[None]
        wanted = sum(
            group.weights[index, e] * mlp(x, group.gate_up[e], group.down[e]) for e in range(3)
        )
        torch.testing.assert_close(said[row : row + 1], wanted)


def test_experts_that_no_row_chose_become_their_mean() -> None:
    gate_up, down = experts(2, seed=7)
    nobody = Group(
        gate_up, down, np.zeros((4, WIDTH), np.float32), np.zeros(0, np.int64), torch.zeros(0, 2)
    )

    united = distil(nobody, nobody, Recipe(steps=5), seed=0, dtype=torch.float32)

    torch.testing.assert_close(united.gate_up, gate_up.mean(dim=0))
    assert united.error is None
