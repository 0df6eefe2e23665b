import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import Sampling
from moesaic.engine.sequences.sampling import describe, draw, sample


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

    [told, other] = describe(logits.expand(2, 3), [0, 2], [2, 0])

    assert told.logprob == pytest.approx(float(logprobs[0]))
    assert [token for token, _ in told.top] == [2, 1]
    assert told.top[0][1] == pytest.approx(float(logprobs[2]))
    assert (told.rank, other.rank, other.top) == (3, 1, ())


def reference(logits: torch.Tensor, how: Sampling, position: int) -> int:
    """One row on its own: the rules in the order of likelihood, the draw in that of ids."""
    probs = (logits.double() / how.temperature).softmax(-1).tolist()
    order = range(len(probs))
    if how.top_k or how.top_p < 1 or how.min_p:
        order = sorted(order, key=lambda token: (-probs[token], token))[: how.top_k or None]
        total, before = sum(probs[token] for token in order), 0.0
        nucleus = []
        for token in order:
            if how.top_p == 1 or before < how.top_p * total:
                nucleus.append(token)
            before += probs[token]
        order = [token for token in nucleus if probs[token] >= how.min_p * probs[order[0]]]
    order = sorted(order)
    target = draw(how.seed, position) * sum(probs[token] for token in order)
    reached = 0.0
    for token in order:
        reached += probs[token]
        if reached > target:
            return token
    raise AssertionError("the draw is below the total")


ANY_SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(-9, 9),
)


@given(st.lists(ANY_SAMPLING, min_size=1, max_size=70), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_rows_drawn_together_are_each_drawn_by_definition(hows: list[Sampling], seed: int) -> None:
    logits = torch.randn(len(hows), 20, generator=torch.Generator().manual_seed(seed))
    logits[:, 3] = -torch.inf

    picked = sample(logits, [(how, seed + i) for i, how in enumerate(hows)])

    expected = [reference(logits[i], how, seed + i) for i, how in enumerate(hows)]
    assert picked == expected
    assert 3 not in picked
