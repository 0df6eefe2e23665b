"""Picking tokens: the kernel and torch's own operations, against the definition in fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from moesaic.kernels import sampling
from moesaic.kernels.sampling import PickRules, pick_tokens, pick_tokens_reference
from moesaic.native.library import scratch

pytestmark = pytest.mark.usefixtures("native")
WAYS = [pick_tokens, pick_tokens_reference]
CLOSE = Fraction(
    1, 1 << 40
)  # a weight has 44 bits, and its exponential is right within its last ones

LOGIT = st.sampled_from([0.0, -0.0, 1.0, 1.0, -3.5, 40.0, 1e-42, -1e30, -math.inf]) | st.floats(
    -20, 20, width=32
)
RULES = st.builds(
    PickRules,
    temperature=st.sampled_from([1e-310, 1e-30, 0.01, 0.3, 1.0, 1.0, 2.0, 1e6, 1e300]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1e-9, 0.2, 0.5, 0.9, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    draw=st.just(0.0),
)


def kept_tokens(logits: list[float], how: PickRules) -> dict[int, Fraction] | None:
    """Those that the rules keep, with their shares of the draw; None: rounding decides which."""
    most = max(logits)
    scaled = [(x - most) / how.temperature if x < most else 0.0 for x in logits]
    parts = [Fraction(math.exp(x)) if x > -30.4 else Fraction(0) for x in scaled]  # 2^-44
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: how.top_k or None]
    total, before, nucleus = sum(parts[token] for token in order), Fraction(0), []
    for token in order:
        bound = Fraction(math.floor(how.top_p * 2**53), 2**53) * total
        exact = all(parts[t] in (0, 1) for t in order)
        if how.top_p < 1 and not exact and abs(before - bound) < CLOSE:
            return None
        if how.top_p == 1 or before < bound:
            nucleus.append(token)
        before += parts[token]
    least = Fraction(how.min_p)
    if any(parts[token] < 1 and abs(parts[token] - least) < CLOSE for token in nucleus):
        return None
    kept = {token: parts[token] for token in nucleus if parts[token] >= least}
    total = sum(kept.values())
    return {token: kept[token] / total for token in sorted(kept)}


@pytest.mark.parametrize("pick", WAYS)
@given(st.lists(LOGIT, min_size=1, max_size=40), RULES)
@example([0.0] * 10, PickRules(1.0, top_p=0.3))
@example([-math.inf, 2.0, -math.inf], PickRules(1.0, top_p=0.3, top_k=2))
@settings(max_examples=300, deadline=None)
def test_every_kept_token_has_its_share_of_the_draws_and_no_other_has_any(
    pick: object, logits: list[float], how: PickRules
) -> None:
    assume(max(logits) > -math.inf)
    shares = kept_tokens([float(x) for x in np.float32(logits)], how)
    assume(shares is not None)
    asked, expected, reached = [], [], Fraction(0)
    for token, share in (shares or {}).items():
        inset = Fraction(len(logits) + 2, 1 << 40)  # of rounded weights, and of a draw's 53 bits
        if share > 2 * inset:
            for draw in (reached + inset, reached + share / 2, reached + share - inset):
                asked.append(how._replace(draw=float(draw)))
                expected.append(token)
        reached += share
    assume(asked)

    picked = pick(torch.tensor([logits] * len(asked), dtype=torch.float32), asked)  # type: ignore[operator]

    assert picked == expected


def flat(rows: int, vocab: int = 151_936) -> torch.Tensor:
    """Logits of a model with random weights, among which some are equal."""
    return (
        torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 256
    ).round() / 512


@pytest.mark.parametrize(
    "how",
    [
        PickRules(1.0),
        PickRules(1.0, top_p=0.9),
        PickRules(0.02, top_p=0.9),
        PickRules(1e9, top_p=0.9),
        PickRules(0.7, top_k=20),
        PickRules(0.7, top_k=100_000, top_p=0.5, min_p=0.05),
        PickRules(1.3, min_p=0.3),
        PickRules(),
    ],
    ids=str,
)
def test_large_vocabularies_are_picked_from_as_after_sorting(how: PickRules) -> None:
    logits = flat(12)
    logits[1, 5] = 40.0  # far from all others, which then lie close together
    logits[2, :-3] = -torch.inf
    logits[3] = 1.0
    logits[4] *= 8
    rules = [how._replace(draw=row / 12) for row in range(12)]

    assert pick_tokens(logits, rules) == pick_tokens_reference(logits, rules)


def test_equal_logits_are_kept_by_the_lowest_ids() -> None:
    logits = torch.zeros(1, 100_000)
    logits[0, 7] = -1.0
    last_draw = 1 - 2**-53

    [by_k] = pick_tokens(logits, [PickRules(1.0, top_k=1000, draw=last_draw)])
    [by_p] = pick_tokens(logits, [PickRules(1.0, top_k=1000, top_p=0.25, draw=last_draw)])

    assert (by_k, by_p) == (1000, 250)  # token 7 is not among the first thousand


def test_frequencies_are_the_exact_probabilities() -> None:
    """Chi-squared, with top-p over a vocabulary of the size that counts."""
    logits = flat(1, 50_000)
    logits[0, 17], logits[0, 49_998] = 9.0, 8.0
    how, num_draws = PickRules(0.9, top_p=0.8), 20_000
    draws = np.random.default_rng(5).random(num_draws)

    picked = np.array(
        pick_tokens(logits.expand(num_draws, -1), [how._replace(draw=float(d)) for d in draws])
    )

    probs = (logits[0].double() / how.temperature).softmax(-1)
    ordered, ids = probs.sort(descending=True, stable=True)
    num_kept = int((ordered.cumsum(-1) - ordered < how.top_p).sum())
    kept = torch.zeros_like(probs).scatter(0, ids[:num_kept], ordered[:num_kept])
    expected = (kept / kept.sum()).numpy() * num_draws
    # Rare tokens together, by their place: each cell expects some hundred draws.
    cells = np.where(np.isin(np.arange(50_000), [17, 49_998]), np.arange(50_000), 0)
    cells = np.where(cells == 0, 50_000 + np.arange(50_000) // 1000, cells)
    observed = np.bincount(cells[picked], minlength=60_000)
    wanted = np.bincount(cells, weights=expected, minlength=60_000)
    used = wanted > 0
    chi_squared = (((observed - wanted) ** 2)[used] / wanted[used]).sum()
    freedom = used.sum() - 1
    assert observed[~used].sum() == 0
    assert set(picked) <= set(ids[:num_kept].tolist())
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_a_token_depends_on_no_row_beside_it_and_on_no_number_of_threads() -> None:
    logits = flat(9, 30_000)
    rules = [PickRules(1.0, 25_000, 0.9, 0.1 * (row % 2), row / 9) for row in range(9)]

    together = pick_tokens(logits, rules)
    alone = [pick_tokens(logits[r : r + 1], rules[r : r + 1])[0] for r in range(9)]
    wide = torch.zeros(9, 70_000)
    wide[:, 128:30_128] = logits
    torch.set_num_threads(1)
    by_one = pick_tokens(wide[:, 128:30_128], rules)  # rows that lie apart

    assert together == alone == by_one


@pytest.mark.parametrize("how", [PickRules(), PickRules(1.0, 3, 0.9), PickRules(1.0, 0, 0.5, 0.1)])
def test_numbers_that_are_none_are_not_picked_and_harm_nothing(how: PickRules) -> None:
    logits = torch.full((3, 1000), torch.nan)
    logits[0, 4], logits[0, 5] = 1.0, 0.5
    logits[1, 6] = torch.inf

    picked = pick_tokens(logits, [how] * 3)

    assert picked[0] == 4
    assert picked[1] == 6
    assert 0 <= picked[2] < 1000


def test_no_rows_have_no_tokens() -> None:
    assert pick_tokens(torch.empty(0, 5), []) == pick_tokens_reference(torch.empty(0, 5), []) == []


def test_memory_of_a_thread_is_some_bytes_a_token() -> None:
    vocab = 151_936
    pick_tokens(flat(1), [PickRules(1.0, 1000, 0.9)])

    assert scratch(0)
    assert sampling.lib().sample_scratch(vocab=vocab, threads=1) < 24 * vocab
