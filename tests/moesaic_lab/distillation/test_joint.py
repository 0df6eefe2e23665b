"""The second stage: united experts learn what the whole model answers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.brownout.split import Layer, Level, split_choices
from moesaic.messages.substitution import Substitution
from moesaic_lab.distillation.frozen import Both, FrozenWeights
from moesaic_lab.distillation.joint import JointDistillation, _weights, divergence_of, measure
from moesaic_lab.distillation.network import Degraded, PassedRows, TrainableModel, _going
from moesaic_lab.distillation.recipe import DistillProgress, Recipe
from moesaic_lab.distillation.texts import LearningSequence, LearningText
from tests.moesaic_lab.distillation.conftest import Model

WAY = 4


@pytest.fixture(scope="module")
def network(small: Model) -> TrainableModel:
    return TrainableModel(FrozenWeights.load(*small))


@pytest.fixture(scope="module")
def begun(small: Model, network: TrainableModel) -> dict[int, Both]:
    """The first expert of each group."""
    layers = FrozenWeights.load(*small).layers
    return {
        index: (
            torch.stack([gate_up for gate_up, _ in layer.experts[::WAY]]),
            torch.stack([down for _, down in layer.experts[::WAY]]),
        )
        for index, layer in enumerate(layers)
    }


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_answers_come_closer_to_those_of_the_whole_model(
    threshold: float,
    network: TrainableModel,
    begun: dict[int, Both],
    text: LearningText,
    tmp_path: Path,
) -> None:
    recipe = Recipe(joint_steps=40, joint_tokens=300)
    training = JointDistillation(network, WAY, begun, recipe, tmp_path / "part")

    trained = training.train(text.train, lambda progress: None)

    tokens = [own.tokens for own in text.train]
    exact = network.compute(tokens)
    before, after = (
        float(divergence_of(exact, network.compute(tokens, Degraded(WAY, united, threshold))))
        for united in (begun, trained)
    )
    assert after < 0.8 * before


def test_steps_in_which_every_expert_stays_teach_nothing(
    network: TrainableModel,
    begun: dict[int, Both],
    text: LearningText,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moesaic_lab.distillation.joint.ALL_SHARE", 0.0)
    recipe = Recipe(joint_steps=2, joint_tokens=9, joint_threshold=1.0)
    part = tmp_path / "part"

    def trained() -> dict[int, Both]:
        return JointDistillation(network, WAY, begun, recipe, part).train(text.train, say)

    def say(progress: DistillProgress) -> None:
        notes.append(progress.note)

    notes: list[str] = []
    united = trained()

    assert notes == ["divergence 0.0000"] * 2
    for layer, both in united.items():
        assert all(map(torch.equal, both, begun[layer]))
    assert all(map(torch.equal, trained()[0], begun[0]))  # as it was saved


def test_at_a_threshold_of_one_nothing_is_lost(
    network: TrainableModel, begun: dict[int, Both], text: LearningText
) -> None:
    quality = measure(network, Degraded(WAY, begun, threshold=1.0), text.held_out)

    assert quality.agreement == 1
    assert quality.exact == quality.united


def test_only_tokens_that_are_asked_for_are_measured(
    network: TrainableModel, begun: dict[int, Both]
) -> None:
    sequences = [LearningSequence([5, 9, 2, 7, 1], 3), LearningSequence([4, 4, 8], 1)]

    quality = measure(network, Degraded(WAY, begun, threshold=1.0), sequences)

    logits = network.compute([own.tokens for own in sequences]).logits
    asked = {2: 7, 3: 1, 5: 4, 6: 8}  # the token behind each row
    losses = [-logits[row].log_softmax(0)[token] for row, token in asked.items()]
    assert quality.exact == pytest.approx(float(sum(losses)) / 4, rel=1e-5)


def test_a_label_weighs_beside_a_long_answer() -> None:
    exact, united = (PassedRows([], rows) for rows in torch.randn(2, 6, 9))
    sequences = [LearningSequence([5, 9, 2, 7, 1, 3], 2), LearningSequence([4, 4, 8], 2)]

    weights = _weights(sequences)

    assert weights.tolist() == [0.5] * 4 + [1.0]
    exact, united = (PassedRows([], own.logits[:5]) for own in (exact, united))
    of_rows = [
        divergence_of(*(PassedRows([], own.logits[row : row + 1]) for own in (exact, united)))
        for row in range(5)
    ]
    mean = sum(own * weight for own, weight in zip(of_rows, weights, strict=True)) / 3
    torch.testing.assert_close(divergence_of(exact, united, weights), mean)


def test_the_popular_stay() -> None:
    ids = torch.tensor([[0], [0], [0], [1], [1], [2], [3]])

    def going(threshold: float) -> list[bool]:
        sequence = torch.zeros(len(ids), dtype=torch.long)
        return _going(ids, 4, sequence, Degraded(2, {}, threshold)).flatten().tolist()

    assert going(0.0) == [True] * 7
    assert going(0.4) == [False] * 3 + [True] * 4
    assert going(0.5) == [False] * 5 + [True] * 2
    assert going(1.0) == [False] * 7


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("way", [2, 3])
def test_apart_each_sequence_is_split_as_a_batch_that_is_served(way: int, threshold: float) -> None:
    lengths, generator = [1, 5, 9], torch.Generator().manual_seed(way)
    ids = torch.rand(sum(lengths), 8, generator=generator).topk(2, dim=1).indices
    sequence = torch.arange(3).repeat_interleave(torch.tensor(lengths))

    going = _going(ids, 8, sequence, Degraded(way, {}, threshold, apart=True))

    for own, goes in zip(ids.split(lengths), going.split(lengths), strict=True):
        layer = Layer(8, Substitution(way=way, instead="united"))
        rows = np.zeros(len(own), np.uint8)
        weights = np.full(own.shape, 0.5, np.float32)
        choices = split_choices(own.int().numpy(), weights, [Level(threshold)], rows, layer)
        assert goes.sum(dim=1).tolist() == choices.degraded.tolist()
