"""Picks a token of each row of logits: greedily, or by temperature, top-k, top-p and min-p.

Weights of tokens are whole numbers, ``round(2^bits * e^((logit - largest) / temperature))``. Their
sums are exact, so a row's token depends only on its logits, rules and draw. The order of additions,
other rows and the number of threads do not matter. The exponential is made of products and sums that
are rounded one by one, so processors and GPUs pick the same tokens. A token that weighs less than
``2^-44`` of the most likely one is not picked.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.promised import on_device
from moesaic.kernels.token_weights import DRAW_BITS, weigh
from moesaic.native.library import lib, scratch, usable

_MOST_BITS = 44
_MOST_SHARPNESS = 1e300
_ROWS_AT_ONCE = 8  # sorting takes 40 bytes for each entry of these rows


class PickRules(NamedTuple):
    """Rules for picking the token of one row."""

    temperature: float = 0.0  # 0: the likeliest, whatever the rest says
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    draw: float = 0.0  # in [0, 1): the token


class RuleNumbers:
    """The rules of all rows as numbers.

    Attributes:
        bits: fractional bits of a weight.
        sharpness: float64 ``[R]``, the inverse of the temperature; 0: greedy.
        top_k: int64 ``[R]``, in ``1..V``.
        top_p, draws: int64 ``[R]``, in ``2^-53``, rounded down.
        min_weight: int64 ``[R]``.
    """

    def __init__(self, rules: Sequence[PickRules], vocab: int) -> None:
        self.bits = min(_MOST_BITS, 62 - vocab.bit_length())  # the sum of all weights has 63
        columns = [np.array(column, np.float64) for column in zip(*rules, strict=True)]
        temperature, top_k, top_p, min_p, draws = columns
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.minimum(1 / temperature, _MOST_SHARPNESS)
        self.sharpness = np.where(temperature > 0, inverse, 0.0)
        self.top_k = np.where(top_k > 0, np.minimum(top_k, vocab), vocab).astype(np.int64)
        self.top_p = np.ldexp(top_p, DRAW_BITS).astype(np.int64)
        self.min_weight = np.ceil(np.ldexp(min_p, self.bits)).astype(np.int64)
        self.draws = np.ldexp(draws, DRAW_BITS).astype(np.int64)

    def table(self) -> Tensor:
        """Return the columns below each other, int64 ``[5, R]``; the sharpness as the bits of its float64."""
        columns = (self.top_k, self.top_p, self.min_weight, self.draws)
        return torch.from_numpy(np.stack([self.sharpness.view(np.int64), *columns]))


def pick_tokens(logits: Tensor, rules: Sequence[PickRules]) -> list[int]:
    """Pick a token of each row.

    Tokens are in order, the most likely first; ties go to the lowest id. Top-k keeps the first
    ``k``. Of these, top-p keeps the shortest prefix with that share of their weight. Min-p then
    keeps those that weigh at least that part of the most likely one. The weights of the remaining
    tokens lie side by side in the order of their ids, with sum ``s``. The draw picks the token that
    has unit ``floor(draw * s)``.

    Args:
        logits: float32 ``[R, V]``; minus infinity is never picked if anything else is there.
        rules: rules of each row.
    """
    if not rules:
        return []
    if logits.is_cuda:
        return pick_on_gpu(logits, rules)
    if not usable(logits):
        return pick_tokens_reference(logits, rules)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    vocab, threads = logits.shape[1], min(torch.get_num_threads(), len(rules))
    numbers, tokens = RuleNumbers(rules, vocab), np.empty(len(rules), np.int64)
    lib().sample(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        count=len(rules),
        vocab=vocab,
        bits=numbers.bits,
        sharpness=numbers.sharpness.ctypes.data,
        top_k=numbers.top_k.ctypes.data,
        top_p=numbers.top_p.ctypes.data,
        min_weight=numbers.min_weight.ctypes.data,
        draws=numbers.draws.ctypes.data,
        tokens=tokens.ctypes.data,
        scratch=scratch(lib().sample_scratch(vocab=vocab, threads=threads)),
        threads=threads,
    )
    return tokens.tolist()


def pick_on_gpu(logits: Tensor, rules: Sequence[PickRules]) -> list[int]:
    """Pick as ``pick_tokens``, with a Triton kernel; waits for the device once."""
    from moesaic.kernels.triton import sampling as kernel

    numbers = RuleNumbers(rules, logits.shape[1])
    table = on_device(numbers.table(), logits.device)
    tokens: list[int] = kernel.pick_tokens(logits.contiguous(), table, numbers.bits).tolist()
    return tokens


def pick_tokens_reference(logits: Tensor, rules: Sequence[PickRules]) -> list[int]:
    """Pick as ``pick_tokens``, in torch's own operations: the vocabulary is sorted."""
    tokens = []
    for start in range(0, len(rules), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        tokens += _pick(logits[some], rules[some])
    return tokens


def _pick(logits: Tensor, rules: Sequence[PickRules]) -> list[int]:
    greedy = _first_of_largest(logits)
    if all(how.temperature <= 0 for how in rules):
        return greedy.squeeze(1).tolist()
    numbers = RuleNumbers(rules, logits.shape[1])

    def column(values: np.ndarray | Sequence[int]) -> Tensor:
        return torch.as_tensor(values, device=logits.device).unsqueeze(1)

    most, sharpness = logits.gather(1, greedy), column(numbers.sharpness)
    weights = weigh((logits.double() - most.double()) * sharpness, numbers.bits)
    if any(how.top_k or how.top_p < 1 or how.min_p for how in rules):
        logits = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        ordered = weights.gather(1, ids)
        rank = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.where(rank < column(numbers.top_k), 0)
        reached = ordered.cumsum(dim=-1)
        totals = reached[:, -1].tolist()
        # Python's whole numbers have no bound.
        shares = zip(numbers.top_p.tolist(), totals, strict=True)
        need = column([-(-share * total >> DRAW_BITS) for share, total in shares])
        inside = (reached - ordered < need) & (ordered >= column(numbers.min_weight))
        weights = torch.zeros_like(weights).scatter(1, ids, ordered.where(inside, 0))
    bounds = weights.cumsum(dim=-1)
    draws = zip(numbers.draws.tolist(), bounds[:, -1].tolist(), strict=True)
    at = column([draw * total >> DRAW_BITS for draw, total in draws])
    drawn = torch.searchsorted(bounds, at, right=True)
    is_drawn = (sharpness > 0) & most.isfinite() & (bounds[:, -1:] > 0)
    return torch.where(is_drawn, drawn, greedy).squeeze(1).tolist()


def _first_of_largest(logits: Tensor) -> Tensor:
    """Return the token of the largest logit, ``[R, 1]``: of equal ones the first, and no NaN if there is another."""
    # The bits of floats order as they do, if those behind the sign are turned round in negative ones.
    bits = torch.where(logits == 0, 0.0, logits).contiguous().view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(logits.isnan(), -(2**31)).long()
    columns = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return ((keys << 32) | columns).argmax(dim=-1, keepdim=True)
