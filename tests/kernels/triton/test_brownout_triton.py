"""The split of choices on a GPU: to the last bit as its reference."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.brownout import split
from moesaic.brownout.split import Layer, Level
from moesaic.kernels.promised import LayerSubstitution, PromisedRows, StaticPromises
from moesaic.kernels.triton.brownout import split_choices
from moesaic.kernels.warm_up import row_counts
from moesaic.messages.substitution import Substitution
from tests.brownout.test_split import batches
from tests.kernels.brownout.test_split_native import layer_substitution

LEVELS = [Level(0.7, 5), Level(1.0, -3), Level(0.3, 5), Level(0.5, -3)]
INSTEAD = ["united", "fewer", "nothing"]


def check(batch: dict[str, Any], device: torch.device, times: int = 1) -> split.Choices:
    expected = split.split_choices(**batch)
    promised = PromisedRows(batch["levels"], torch.from_numpy(batch["level_of_row"]), device)
    layer = layer_substitution(batch["layer"])
    for _ in range(times):
        ids, weights = (
            torch.from_numpy(batch[name].copy()).to(device) for name in ("topk_ids", "topk_weights")
        )

        split_choices(ids, weights, promised, layer)

        np.testing.assert_array_equal(ids.cpu().numpy(), expected.ids)
        assert weights.cpu().numpy().tobytes() == expected.weights.tobytes()
    np.testing.assert_array_equal(promised.settle()[0].numpy(), times * expected.degraded)
    return expected


def batch_of(
    num_rows: int,
    num_experts: int,
    top_k: int,
    substitution: Substitution,
    levels: list[Level] = LEVELS,
    *,
    apart: bool = False,
) -> dict[str, Any]:
    """A few experts are popular, one in twenty is lost; they are on eight workers if ``apart``."""
    rng = np.random.default_rng(num_rows)
    popular = np.log(rng.random(num_experts) ** 3 + 0.01)
    drawn = popular + rng.gumbel(size=(num_rows, num_experts))
    weights = rng.random((num_rows, top_k), dtype=np.float32)
    return {
        "topk_ids": drawn.argsort(axis=1)[:, :top_k].astype(np.int32),
        "topk_weights": weights / weights.sum(axis=1, keepdims=True),
        "levels": levels,
        "level_of_row": rng.integers(0, len(levels), num_rows).astype(np.uint8),
        "layer": Layer(
            num_experts,
            substitution,
            rng.random(num_experts) < 0.05,
            rng.integers(0, 8, num_experts).astype(np.int32) if apart else None,
        ),
    }


@settings(max_examples=100)
@given(batch=batches(instead=None, may_lose=True))
def test_it_splits_as_the_reference_does(device: torch.device, batch: dict[str, Any]) -> None:
    check(batch, device)


@pytest.mark.parametrize("instead", INSTEAD)
def test_many_rows_are_split_by_several_programs(device: torch.device, instead: Any) -> None:
    # What the first of two layers has put on the device is there in the second.
    substitution = Substitution(way=4, instead=instead)
    expected = check(batch_of(300, 128, 8, substitution), device, times=2)
    check(batch_of(300, 128, 8, substitution, apart=True), device, times=2)

    assert 0 < expected.degraded.sum() < expected.ids.size


def test_of_experts_with_as_many_rows_the_lowest_stay(device: torch.device) -> None:
    batch = batch_of(1, 8, 8, Substitution(), [Level(0.5)])
    expected = check({**batch, "layer": Layer(8, Substitution())}, device)

    assert sorted(expected.ids[0].tolist()) == [-1] * 4 + [0, 1, 2, 3]


def test_as_many_levels_as_there_can_be_are_told_apart(device: torch.device) -> None:
    levels = [Level(i / 300, i % 3 - 1) for i in range(split.MAX_LEVELS)]

    check(batch_of(500, 20, 3, Substitution(way=5, instead="united"), levels), device)


@pytest.mark.parametrize("instead", INSTEAD)
def test_rows_that_fill_a_step_up_count_nowhere(device: torch.device, instead: Any) -> None:
    substitution, static = Substitution(way=4, instead=instead), StaticPromises(8, device, 1)
    for num_rows in (5, 8, 3):
        batch = batch_of(num_rows, 20, 3, substitution, LEVELS[: num_rows - 2])
        expected = split.split_choices(**batch)
        promised = PromisedRows(batch["levels"], torch.from_numpy(batch["level_of_row"]), device)
        repeated = [*range(num_rows), *[0] * (8 - num_rows)]
        ids, weights = (
            torch.from_numpy(batch[name][repeated]).to(device)
            for name in ("topk_ids", "topk_weights")
        )
        static.degraded.zero_()
        static.fill(promised)

        split_choices(ids, weights, static, layer_substitution(batch["layer"]))

        static.settle_in(promised)
        np.testing.assert_array_equal(ids.cpu().numpy(), expected.ids[repeated])
        assert weights.cpu().numpy().tobytes() == expected.weights[repeated].tobytes()
        np.testing.assert_array_equal(promised.settle()[0].numpy(), expected.degraded)


def test_no_rows_are_split_into_nothing(device: torch.device) -> None:
    ids = torch.zeros(0, 3, dtype=torch.int32, device=device)
    weights = torch.zeros(0, 3, device=device)

    split_choices(ids, weights, PromisedRows(LEVELS, [], device), LayerSubstitution(8))


@pytest.mark.parametrize("launches", [False], indirect=True, ids=["not run"])
@pytest.mark.parametrize("instead", INSTEAD)
def test_other_rows_and_levels_compile_nothing_more(instead: Any, launches: set[str]) -> None:
    layer = LayerSubstitution(60, Substitution(way=4, instead=instead))

    def launch(num_rows: int, levels: list[Level]) -> None:
        promised = PromisedRows(levels, [i % len(levels) for i in range(num_rows)])
        ids, weights = torch.zeros(num_rows, 4, dtype=torch.int32), torch.zeros(num_rows, 4)
        split_choices(ids, weights, promised, layer)

    for num_rows in row_counts(100):
        launch(num_rows, LEVELS[:1])
    warmed = set(launches)
    for num_rows in (3, 7, 48, 99, 640):
        launch(num_rows, LEVELS[: num_rows % 4 + 1])
        launch(num_rows, LEVELS * 4)

    assert len(warmed) == 3
    assert launches == warmed


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 512, 16384])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "way"), [(8, 2, 4), (60, 4, 3), (128, 8, 4), (160, 6, 7), (512, 10, 8)]
)
@pytest.mark.parametrize("instead", INSTEAD)
def test_it_splits_a_models_choices(
    num_rows: int, num_experts: int, top_k: int, way: int, instead: Any
) -> None:
    for apart in (False, True):
        batch = batch_of(
            num_rows, num_experts, top_k, Substitution(way=way, instead=instead), apart=apart
        )
        check(batch, torch.device("cuda"))
