"""Sampling: from logits to tokens.

Randomness is counter-based: the draw for token ``n`` of a request is a function of its seed and
``n``. So a request that goes on elsewhere gets the same tokens as if it had stayed. For the same
reason no row's token depends on the rows beside it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.sequences.requests import Sampling

ROWS_AT_ONCE = 8  # drawing takes 8 to 24 bytes for each entry of these rows

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
    tokens = logits.argmax(dim=-1)
    filtered = [r for r, (how, _) in enumerate(rows) if how.temperature > 0 and _filters(how)]
    free = [r for r, (how, _) in enumerate(rows) if how.temperature > 0 and not _filters(how)]
    for wanted, pick in ((filtered, _draw_filtered), (free, _draw_free)):
        for start in range(0, len(wanted), ROWS_AT_ONCE):
            some = wanted[start : start + ROWS_AT_ONCE]
            tokens[some] = pick(logits[some], [rows[r] for r in some])
    return [int(token) for token in tokens.tolist()]


def _filters(how: Sampling) -> bool:
    return how.top_k > 0 or how.top_p < 1 or how.min_p > 0


def _probabilities(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    temperature = _column([how.temperature for how, _ in rows], logits)
    return (logits.double() / temperature).softmax(dim=-1)


def _draw_free(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    return _invert(_probabilities(logits, rows).cumsum(dim=-1), rows)


def _draw_filtered(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Apply top-k, then top-p to the rest, then min-p, and draw: each keeps the likeliest few."""
    most = [min(how.top_k or logits.shape[-1], logits.shape[-1]) for how, _ in rows]
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = _probabilities(ordered[:, : max(most)], rows)
    num_kept = _column(most, probs)
    top_p = _column([how.top_p for how, _ in rows], probs)
    min_p = _column([how.min_p for how, _ in rows], probs)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    kept = probs.where(rank < num_kept, 0.0)
    reached = kept.cumsum(dim=-1)
    inside = (reached - kept < top_p * reached[:, -1:]) | (top_p == 1)  # always the likeliest
    kept = kept.where(inside & (kept >= min_p * kept[:, :1]), 0.0)
    return ids.gather(1, _invert(kept.cumsum(dim=-1), rows).unsqueeze(1)).squeeze(1)


def _invert(bounds: Tensor, rows: Sequence[Row]) -> Tensor:
    """Find each row's draw among its cumulated, unnormalised probabilities.

    Returns:
        int64 ``[R]``.
    """
    total = bounds[:, -1:]
    at = _column([draw(how.seed, position) for how, position in rows], bounds) * total
    last = (bounds < total).sum(dim=-1)  # rounding may bring a draw up to the total itself
    return torch.searchsorted(bounds, at, right=True).squeeze(1).minimum(last)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
