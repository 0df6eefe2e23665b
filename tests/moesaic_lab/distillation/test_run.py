"""Whole distillations: resumed to the bit, better than the mean, and of the whole model too."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.parity.cases import ParityCase
from moesaic.errors import InvalidInput
from moesaic.models.weights.united import UnitedManifest, find_united
from moesaic_lab.distillation.parts import DistilledParts
from moesaic_lab.distillation.recipe import DistillProgress, Recipe
from moesaic_lab.distillation.run import Distillation
from moesaic_lab.distillation.texts import LearningText
from tests.moesaic_lab.distillation.conftest import VARIED, Model

RECIPE = Recipe(steps=12, batch=64)
JOINT = Recipe(steps=3, batch=32, joint_steps=6, joint_tokens=60)


class Killed(BaseException):
    pass


def distil(
    model: Model,
    text: LearningText,
    recipe: Recipe,
    out: Path,
    killed_at: Callable[[DistillProgress], bool] = lambda progress: False,
    ways: tuple[int, ...] = (2, 8),
) -> tuple[list[UnitedManifest], list[DistillProgress]]:
    told: list[DistillProgress] = []

    def tell(progress: DistillProgress) -> None:
        told.append(progress)
        if killed_at(progress):
            raise Killed

    distillation = Distillation(*model, text, recipe, ways, tell)
    return distillation.run(out), told


def payloads(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("case", VARIED, ids=str)
def test_every_family_gets_better_than_the_mean(
    case: ParityCase,
    varied: Callable[[ParityCase], Model],
    text: LearningText,
    tmp_path: Path,
) -> None:
    model = varied(case)

    [manifest], _ = distil(model, text, RECIPE, tmp_path, ways=(3,))

    assert set(manifest.errors) == set(model[1].moe_layers)
    pairs = [
        (error, mean)
        for layer in manifest.errors
        for error, mean in zip(manifest.errors[layer], manifest.mean_errors[layer], strict=True)
        if error is not None
    ]
    assert all(error <= mean for error, mean in pairs)
    assert sum(error for error, _ in pairs) < 0.95 * sum(mean for _, mean in pairs)


@pytest.mark.parametrize(
    ("recipe", "killed_at"),
    [
        (RECIPE, lambda told: told.done == 7),  # within the second layer
        (JOINT, lambda told: "way 2" in told.stage and told.done == 4),
        (JOINT, lambda told: "way 8" in told.stage and told.done == 1),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    recipe: Recipe,
    killed_at: Callable[[DistillProgress], bool],
    small: Model,
    text: LearningText,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moesaic_lab.distillation.joint.SAVE_EVERY", 3)
    _, all_told = distil(small, text, recipe, tmp_path / "whole")
    with pytest.raises(Killed):
        distil(small, text, recipe, tmp_path / "killed", killed_at)
    assert "united-way-8.safetensors" not in payloads(tmp_path / "killed")

    _, told = distil(small, text, recipe, tmp_path / "killed")

    assert payloads(tmp_path / "killed") == payloads(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "killed").iterdir()} == set(
        payloads(tmp_path / "whole")
    )
    assert len(told) < len(all_told)


def test_another_recipe_or_other_rows_use_nothing_of_a_killed_run(
    small: Model, text: LearningText, tmp_path: Path
) -> None:
    other = LearningText(text.train[::-1], text.held_out)
    _, all_told = distil(small, text, RECIPE, tmp_path / "whole")
    for rows, recipe in ((other, RECIPE), (text, Recipe(steps=12, batch=64, seed=1))):
        with pytest.raises(Killed):
            distil(small, text, RECIPE, tmp_path / "out", lambda told: told.done == 7)

        _, told = distil(small, rows, recipe, tmp_path / "out")

        assert len(told) == len(all_told)


def test_a_run_of_one_way_leaves_what_is_done_of_others(
    small: Model, text: LearningText, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        distil(small, text, RECIPE, tmp_path, lambda told: told.done == 14)  # two layers of three
    distil(small, text, RECIPE, tmp_path, ways=(2,))

    _, told = distil(small, text, RECIPE, tmp_path, ways=(8,))

    assert [progress.done for progress in told] == [3]


def test_united_experts_go_on_learning_where_others_ended(
    small: Model, text: LearningText, tmp_path: Path
) -> None:
    recipe = Recipe(steps=0, joint_steps=6, joint_tokens=60, joint_threshold=0.4)
    [begun] = distil(small, text, RECIPE, tmp_path / "begun", ways=(2,))[0]
    distil(small, text, JOINT, tmp_path / "other", ways=(2,))

    def go_on(start: str, out: str, at: int | None = None) -> list[DistillProgress]:
        told: list[DistillProgress] = []

        def tell(progress: DistillProgress) -> None:
            told.append(progress)
            if progress.done == at:
                raise Killed

        Distillation(*small, text, recipe, (2,), tell, tmp_path / start).run(tmp_path / out)
        return told

    told = go_on("begun", "out")

    assert {progress.stage for progress in told} == {"way 2, whole model"}
    manifest = find_united(tmp_path / "out", small[1])[2].manifest
    assert manifest.mean_errors == begun.mean_errors
    assert manifest.digests != find_united(tmp_path / "begun", small[1])[2].manifest.digests
    assert manifest.recipe["steps"] == 0
    assert manifest.recipe["joint_threshold"] == 0.4

    # What others taught is of no use to it.
    with pytest.raises(Killed):
        go_on("begun", "again", at=4)
    go_on("other", "again")
    go_on("other", "fresh")
    assert payloads(tmp_path / "again") == payloads(tmp_path / "fresh")
    assert payloads(tmp_path / "fresh") != payloads(tmp_path / "out")


def test_a_start_must_have_every_way(small: Model, text: LearningText, tmp_path: Path) -> None:
    distil(small, text, RECIPE, tmp_path, ways=(2,))

    for start, problem in ((tmp_path, "no united experts of way 8"), (tmp_path / "x", "not a dir")):
        with pytest.raises(InvalidInput, match=f"--start: .*{problem}"):
            Distillation(*small, text, JOINT, (2, 8), start=start)


def test_two_runs_at_once_are_refused(small: Model, text: LearningText, tmp_path: Path) -> None:
    with (
        DistilledParts.claimed(tmp_path, small[1].weights_digest, text.digest, RECIPE),
        pytest.raises(InvalidInput, match="in use by another run"),
    ):
        distil(small, text, RECIPE, tmp_path)


def test_what_is_written_is_what_is_found(small: Model, text: LearningText, tmp_path: Path) -> None:
    manifests, _ = distil(small, text, RECIPE, tmp_path)

    found = find_united(tmp_path, small[1])

    assert list(found) == [2, 8]
    assert [united.manifest.errors for united in found.values()] == [m.errors for m in manifests]
