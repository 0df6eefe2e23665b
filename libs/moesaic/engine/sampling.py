"""From logits to tokens.

Randomness is counter-based: the draw for token ``n`` of a request is a function of its seed and
``n``. A request that goes on elsewhere therefore gets the same tokens as if it had stayed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.requests import Sampling, TokenLogprob


def draw(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to ``position`` under ``seed``."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(bits).random())


def sample(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Pick one token a row.

    Args:
        logits: float32 ``[R, V]``.
        rows: for each row, how to sample and the token's position in its sequence, prompt included.
    """
    greedy = logits.argmax(dim=-1).tolist()
    return [
        token if how.temperature == 0 else _draw_token(logits[row], how, position)
        for row, (token, (how, position)) in enumerate(zip(greedy, rows, strict=True))
    ]


def _draw_token(logits: Tensor, how: Sampling, position: int) -> int:
    """Filter in the usual order (temperature, top-k, top-p, min-p), then invert the cumulative
    distribution."""
    probs = (logits.double() / how.temperature).softmax(dim=-1)
    kept, ids = probs.sort(descending=True, stable=True)
    if how.top_k:
        kept, ids = kept[: how.top_k], ids[: how.top_k]
    if how.top_p < 1:
        before = kept.cumsum(dim=-1) - kept
        kept = kept[before < how.top_p * float(kept.sum())]  # always keeps the likeliest
    if how.min_p > 0:
        kept = kept[kept >= how.min_p * kept[0]]
    bounds = kept.cumsum(dim=-1)
    chosen = int(torch.searchsorted(bounds, draw(how.seed, position) * bounds[-1], right=True))
    return int(ids[min(chosen, len(kept) - 1)])


def describe(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of ``token_id`` and of the ``num_top`` likeliest tokens, from one row
    ``[V]``."""
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(num_top) if num_top else (logprobs[:0], logprobs[:0].long())
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logprobs[token_id]), top)
