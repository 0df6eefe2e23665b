"""A small random model of every family, and rows for it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.parity.cases import CASES, VOCAB_SIZE, ParityCase, build_reference, prompt_of
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.digest import weights_digest
from moesaic_lab.distillation.texts import LearningSequence, LearningText

Model = tuple[Checkpoint, ModelConfig]

# Dense layers, shared experts, biases, a window, latent attention.
VARIED = [
    case
    for case in CASES
    if str(case)
    in {
        "mixtral: sliding window",
        "qwen2_moe: every second layer sparse",
        "qwen3_moe: biased, dense mix",
        "deepseek_v2: base",
    }
]


def model_of(case: ParityCase, directory: Path) -> Model:
    build_reference(case, directory)
    config = load_config(directory)
    checkpoint = Checkpoint.of_model(directory, config)
    return checkpoint, replace(config, weights_digest=weights_digest(checkpoint.files, directory))


@pytest.fixture(scope="session")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ParityCase], Model]:
    """Make a case's model, once."""
    made: dict[str, Model] = {}

    def make(case: ParityCase) -> Model:
        if str(case) not in made:
            made[str(case)] = model_of(case, tmp_path_factory.mktemp("model"))
        return made[str(case)]

    return make


@pytest.fixture(scope="session")
def small(varied: Callable[[ParityCase], Model]) -> Model:
    """A Qwen3-MoE of three layers, each of eight experts."""
    return varied(next(case for case in CASES if str(case) == "qwen3_moe: base"))


@pytest.fixture(scope="session")
def text() -> LearningText:
    rng = random.Random(0)
    sequences = [
        LearningSequence(prompt_of(rng.randint(2, 40), seed), rng.choice((1, 1, 2)))
        for seed in range(60)
    ]
    assert max(max(own.tokens) for own in sequences) < VOCAB_SIZE
    return LearningText(sequences[:50], sequences[50:])
