"""The sampler of a GPU picks the tokens of its reference and of the kernel for CPUs, to the last one."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels import sampling
from moesaic.kernels.sampling import PickRules, pick_on_gpu, pick_tokens, pick_tokens_reference
from moesaic.kernels.token_weights import weigh
from moesaic.kernels.triton import sampling as kernel

LOGIT = st.sampled_from(
    [0.0, -0.0, 1.0, 1.0, -3.5, 40.0, 1e-42, -1e30, math.inf, -math.inf, math.nan]
)
RULES = st.builds(
    PickRules,
    temperature=st.sampled_from([0.0, 1e-310, 0.01, 0.3, 1.0, 1.0, 2.0, 1e6, 1e300]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1e-9, 0.2, 0.5, 0.9, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    draw=st.sampled_from([0.0, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[float]], list[PickRules]]:
    """Rows of one vocabulary, and their rules."""
    vocab = draw(st.integers(1, 40))
    numbers = LOGIT | st.floats(-20, 20, width=32)
    row = st.tuples(st.lists(numbers, min_size=vocab, max_size=vocab), RULES)
    rows = draw(st.lists(row, min_size=1, max_size=2))
    return [logits for logits, _ in rows], [how for _, how in rows]


@settings(max_examples=25, deadline=None)
@given(step=steps(), block=st.sampled_from([4, 16, 64]))
@example(([[0.0] * 10], [PickRules(1.0, top_p=0.3, draw=0.99)]), 4)
@example(([[-math.inf, 2.0, math.nan]], [PickRules(1.0, 2, 0.3)]), 4)
@example(([[math.nan, -math.inf, math.nan]], [PickRules(1.0)]), 4)
def test_it_picks_the_tokens_of_the_reference(
    device: torch.device, step: tuple[list[list[float]], list[PickRules]], block: int
) -> None:
    rows, rules = step
    logits = torch.tensor(rows, dtype=torch.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_BLOCK", block)
        patch.setattr(kernel, "_PROGRAMS", 2)  # so that one takes several rows
        picked = pick_on_gpu(logits.to(device), rules)

    assert picked == pick_tokens_reference(logits, rules)
    assert picked == pick_tokens(logits, rules)


def test_weights_have_the_bits_of_the_reference(device: torch.device) -> None:
    """Of a wide vocabulary, draws that fall on the bounds between tokens."""
    vocab = 3000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(7)) * 3
    bits = sampling.RuleNumbers([PickRules(0.8)], vocab).bits
    weights = weigh((logits.double() - logits.max().double()) * (1 / 0.8), bits)
    bounds = weights[0].cumsum(0)
    total, places = int(bounds[-1]), range(5, vocab, 700)
    # The first draw of a token, and the last of the one before.
    draws = [-(-(int(bounds[at]) << 53) // total) / 2**53 for at in places]
    rules = [
        PickRules(0.8, draw=draw - below) for draw in draws for below in (0.0, 2.0**-53, 2.0**-52)
    ]

    rows = logits.expand(len(rules), -1)
    picked = pick_on_gpu(rows.to(device), rules)

    assert picked == pick_tokens_reference(rows, rules) == pick_tokens(rows, rules)


@pytest.mark.parametrize("launches", [False], indirect=True, ids=["not run"])
def test_other_rows_and_rules_compile_nothing_more(launches: set[str]) -> None:
    for num_rows in (1, 3, 16, 100):
        how = PickRules(num_rows % 3, num_rows, 0.5, 0.1)
        numbers = sampling.RuleNumbers([how] * num_rows, 1000)
        kernel.pick_tokens(torch.zeros(num_rows, 1000), numbers.table(), numbers.bits)

    assert len(launches) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how",
    [PickRules(), PickRules(1.0), PickRules(0.7, 20, 0.9), PickRules(1.3, 0, 0.95, 0.02)],
    ids=str,
)
def test_it_picks_from_a_models_vocabulary(how: PickRules) -> None:
    logits = torch.randn(100, 151_936, generator=torch.Generator().manual_seed(3)) * 4
    rules = [how._replace(draw=row / 100) for row in range(100)]

    assert pick_tokens(logits.cuda(), rules) == pick_tokens(logits, rules)
