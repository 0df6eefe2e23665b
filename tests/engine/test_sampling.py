import numpy as np
import pytest
import torch

from moesaic.engine.requests import Sampling
from moesaic.engine.sampling import describe, draw, sample


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])

    assert sample(logits, [(Sampling(), 0), (Sampling(), 9)]) == [1, 0]


def test_a_token_depends_on_seed_and_index_only() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    how = Sampling(temperature=1.0, seed=5)

    together = sample(logits, [(how, i) for i in range(4)])
    alone = [sample(logits[i : i + 1], [(how, i)])[0] for i in range(4)]

    assert together == alone
    assert draw(5, 0) != draw(5, 1) != draw(6, 1)


def test_negative_seeds_are_seeds_too() -> None:
    assert 0 <= draw(-1, 0) < 1


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, -1.0])
    temperature = 0.7
    expected = (logits / temperature).softmax(-1).numpy()

    picked = sample(
        logits.expand(4000, 4),
        [(Sampling(temperature=temperature, seed=3), i) for i in range(4000)],
    )
    observed = np.bincount(picked, minlength=4) / 4000

    # four standard errors of the likeliest token's share
    assert np.abs(observed - expected).max() < 4 * (0.25 / 4000) ** 0.5


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.6), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.01), {0}),
        (Sampling(temperature=1.0, min_p=0.5), {0, 1}),
        (Sampling(temperature=1.0, min_p=1.0), {0}),
    ],
)
def test_filters_keep_only_the_likeliest_tokens(how: Sampling, allowed: set[int]) -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])

    picked = {sample(probs.log().unsqueeze(0), [(how, i)])[0] for i in range(300)}

    assert picked == allowed


def test_log_probabilities_are_those_of_the_whole_vocabulary() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    logprobs = logits.log_softmax(-1)

    told = describe(logits, 0, 2)

    assert told.logprob == pytest.approx(float(logprobs[0]))
    assert [token for token, _ in told.top] == [2, 1]
    assert told.top[0][1] == pytest.approx(float(logprobs[2]))
