"""Sampling: from logits to tokens.

Randomness is counter-based: the draw for token ``n`` of a request is a function of its seed and
``n``. So a request that goes on elsewhere gets the same tokens as if it had stayed. For the same
reason no row's token depends on the rows beside it.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moesaic.engine.sequences.requests import Sampling
from moesaic.kernels.sampling import PickRules, pick_tokens

Row = tuple[Sampling, int]
"""The rules of sampling, and the token's position in its sequence, prompt included."""


def draw(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) that belongs to ``position`` under ``seed``."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(bits).random())


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Pick one token a row, of those that ``processors.process`` has left.

    Args:
        logits: float32 ``[R, V]``; minus infinity is never picked.
        rows: ``R`` of them.
    """
    return pick_tokens(logits, [_rules(how, position) for how, position in rows])


def _rules(how: Sampling, position: int) -> PickRules:
    if how.temperature <= 0:
        return PickRules()
    return PickRules(how.temperature, how.top_k, how.top_p, how.min_p, draw(how.seed, position))
