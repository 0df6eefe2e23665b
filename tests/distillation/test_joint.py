"""The second stage: united experts learn what the whole model answers."""

from pathlib import Path

import pytest
import torch

from moesaic.distillation.frozen import Both, FrozenWeights
from moesaic.distillation.joint import JointDistillation, divergence_of, measure
from moesaic.distillation.network import Degraded, TrainableModel, _going
from moesaic.distillation.recipe import Recipe
from moesaic.distillation.texts import LearningSequence, LearningText
from tests.distillation.conftest import Model

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


def test_the_popular_stay_and_noise_lets_others_stay() -> None:
    ids = torch.tensor([[0], [0], [0], [1], [1], [2], [3]])

    def going(threshold: float, noise: torch.Tensor | None = None) -> list[bool]:
        return _going(ids, 4, 0, Degraded(2, {}, threshold, noise)).tolist()

    assert going(0.0) == [True, True, True, True]
    assert going(0.4) == [False, True, True, True]
    assert going(0.5) == [False, False, True, True]
    assert going(1.0) == [False, False, False, False]
    assert going(0.4, torch.tensor([[0.0, 9.0, 0.0, 0.0]])) == [False, False, True, True]
