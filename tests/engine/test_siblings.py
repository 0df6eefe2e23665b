"""Questions about one thing: what they share is computed once, and changes no number."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import ScoreEvent, ScoringTask
from moesaic.prefix.blocks import BLOCK_SIZE
from tests.engine.rig import rig

CANDIDATES = ((5,), (9,), (7, 8, 3))


def tokens_of(seed: int, length: int) -> list[int]:
    return torch.randint(2, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def scored_plainly(tiny_model: Any, prompt: list[int]) -> list[float]:
    """Each candidate behind the prompt, by one pass over both."""
    told = []
    for candidate in CANDIDATES:
        logprobs = tiny_model.logits([*prompt, *candidate]).log_softmax(dim=-1)
        at = range(len(prompt) - 1, len(prompt) - 1 + len(candidate))
        told.append(sum(float(logprobs[i, token]) for i, token in zip(at, candidate, strict=True)))
    return told


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shared=st.integers(0, 90),
    own=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    seed=st.integers(0, 9),
)
async def test_siblings_compute_their_prefix_once_and_score_as_alone(
    tiny_model: Any, shared: int, own: list[int], seed: int
) -> None:
    prefix = tokens_of(seed, shared)
    # Each begins with a token of its own behind the prefix.
    prompts = {
        str(i): [*prefix, 10 + i, *tokens_of(100 + i, length - 1)] for i, length in enumerate(own)
    }

    async with rig(tiny_model, num_blocks=128) as r:  # 24 rows a step: most prefixes take several
        for name, prompt in prompts.items():
            r.submit(name, prompt, ScoringTask(CANDIDATES))
        await r.ended(*prompts)
        told = {e.key.request_id: e.logprobs for e in r.events if isinstance(e, ScoreEvent)}
        cached = [r.cached(name) for name in prompts]

    assert cached == [0, *[shared // BLOCK_SIZE * BLOCK_SIZE] * (len(own) - 1)]
    for name, prompt in prompts.items():
        assert told[name] == pytest.approx(scored_plainly(tiny_model, prompt), abs=2e-4)
