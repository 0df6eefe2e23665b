"""The trainable network computes what the decoder computes, exact and degraded."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.parity.cases import CASES, ParityCase, Served, prompt_of
from moesaic.brownout.split import Layer, Level, split_choices
from moesaic.errors import InvalidInput
from moesaic.messages.substitution import Substitution
from moesaic_lab.distillation.frozen import FrozenWeights
from moesaic_lab.distillation.group import mlp
from moesaic_lab.distillation.network import Degraded, TrainableModel, _choose
from tests.moesaic_lab.distillation.conftest import VARIED, Model

GROUPED = [case for case in VARIED if case.family != "deepseek_v2"]


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_logits_equal_those_of_the_decoder(
    case: ParityCase, varied: Callable[[ParityCase], Model]
) -> None:
    checkpoint, config = varied(case)
    network = TrainableModel(FrozenWeights.load(checkpoint, config))
    sequences = [prompt_of(41, 1), prompt_of(3, 2), prompt_of(38, 3)]
    wanted = torch.tensor([0, 42, 43, 81])

    passed = network.compute(sequences, wanted=wanted)

    served = Served(checkpoint.directory)
    logits = torch.cat([served.forward([(own, 0, list(range(6)))]) for own in sequences])
    torch.testing.assert_close(passed.logits, logits[wanted], atol=1e-4, rtol=0)
    assert [len(rows) for rows in passed.hidden] == [82] * config.num_layers


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_united_experts_serve_what_the_split_gives_them(threshold: float, small: Model) -> None:
    checkpoint, config = small
    weights = FrozenWeights.load(checkpoint, config)
    layer, way = weights.layers[0], 4
    generator = torch.Generator().manual_seed(0)
    united = (
        torch.randn(2, 48, config.hidden_size, generator=generator) * 0.1,
        torch.randn(2, config.hidden_size, 24, generator=generator) * 0.1,
    )
    x = torch.randn(30, config.hidden_size, generator=generator)

    one = torch.zeros(30, dtype=torch.long)
    degraded = Degraded(way, {0: united}, threshold, apart=True)
    said = TrainableModel(weights).feed_forward(0, layer, x, degraded, one)

    topk_weights, ids = _choose(x @ layer.gate.T, config.moe)
    choices = split_choices(
        ids.int().numpy(),
        topk_weights.numpy(),
        [Level(threshold)],
        one.numpy().astype("uint8"),
        Layer(config.moe.num_experts, Substitution(way=way, instead="united")),
    )
    experts = [*layer.experts, *zip(*united, strict=True)]
    expected = torch.zeros_like(x)
    for row in range(30):
        for expert, weight in zip(choices.ids[row], choices.weights[row], strict=True):
            if expert >= 0:
                expected[row] += float(weight) * mlp(x[row : row + 1], *experts[expert])[0]
    torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v2", "glm4_moe", "olmoe", "granitemoe", "ernie4_5_moe", "minimax_m2"],
)
def test_a_model_of_another_kind_is_refused_by_name(
    varied: Callable[[ParityCase], Model], family: str
) -> None:
    case = next(case for case in CASES if case.family == family)

    with pytest.raises(InvalidInput, match=rf"--joint-steps: .*{family}"):
        FrozenWeights.load(*varied(case))
