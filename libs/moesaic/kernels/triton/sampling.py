# Sampling: a token of each row, in one launch.
#   Grid       (min(R, PROGRAMS),); a program takes every PROGRAMS-th row, all of it.
#   Layout     logits [R, V], any row stride; numbers int64 [5, R], as RuleNumbers has them; weights
#              int64 [programs, V], scratch.
#   Cost       a greedy row: one read of its logits. Another: at most 16 reads for top-k and for top-p each, of
#              two bits of the edge's key; one exponential in float64 for each token; three more reads.
#   Order      keys are the bits of floats, turned so that they order as whole numbers; weights are whole numbers:
#              sums are the same in any order. The exponential is a series of products and sums, each rounded:
#              compiled without fusing them, it has the bits of the C kernel and of the reference.
#   Reference  moesaic.kernels.sampling.pick_tokens_reference; the same tokens.
"""Sampling for CUDA."""

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.token_weights import DRAW_BITS, LN2, LOG2_E, SERIES, SHIFT

_BLOCK = 4096  # tokens that are passed over together
_PROGRAMS = 64  # each has scratch of its own
_DRAW_BITS, _OTHER_BITS = tl.constexpr(DRAW_BITS), tl.constexpr(64 - DRAW_BITS)
_WHOLE = tl.constexpr(1 << DRAW_BITS)
_LOG2_E, _SHIFT = tl.constexpr(LOG2_E), tl.constexpr(SHIFT)
_LN2_HIGH, _LN2_LOW = tl.constexpr(LN2[0]), tl.constexpr(LN2[1])
_SERIES, _TERMS = tl.constexpr(SERIES), tl.constexpr(len(SERIES))
_LEAST_KEY = tl.constexpr(-(2**31))  # what is not a number
_INFINITY_KEY = tl.constexpr(0x7F800000)  # the same, negative and less 1: of minus infinity


@triton.jit
def _load_keys(logits, token, vocab):
    """Load logits, and keys that order as they do; zeros of both signs have the same."""
    x = tl.load(logits + token, mask=token < vocab, other=float("nan"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return x, tl.where(x == x, key, _LEAST_KEY)


@triton.jit
def _weigh(x, most, sharpness, bits):
    """The weight of logits; 0 of what is not a number."""
    x = (x.to(tl.float64) - most) * sharpness
    x = tl.where(x > -64.0, x, -64.0)
    n = (x * _LOG2_E + _SHIFT) - _SHIFT
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * 0.0 + _SERIES[0]
    for i in tl.static_range(1, _TERMS):
        p = p * r + _SERIES[i]
    power = ((n.to(tl.int64) + (1023 + bits)) << 52).to(tl.float64, bitcast=True)
    # Rounded to a whole number, ties to even.
    return ((p * power + _SHIFT) - _SHIFT).to(tl.int64)


@triton.jit
def _worth(weights, token, inside, COUNTED: tl.constexpr):
    if COUNTED:
        return inside.to(tl.int64)
    return tl.load(weights + token, mask=inside, other=0)


@triton.jit
def _find_edge(logits, weights, need, low, high, vocab, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The edge of the shortest beginning of the order that is worth ``need``: its key, its last token.

    ``low`` is a key such that all with it or above are worth ``need``; ``high`` is the largest key.
    """
    above = need * 0
    while low < high:
        step = tl.maximum((high - low + 1) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        at_first = tl.zeros((BLOCK,), tl.int64)
        at_second = tl.zeros((BLOCK,), tl.int64)
        at_third = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            _, key = _load_keys(logits, token, vocab)
            worth = _worth(weights, token, (token < vocab) & (key >= first), COUNTED)
            at_first += worth
            at_second += tl.where(key >= second, worth, 0)
            at_third += tl.where(key >= third, worth, 0)
        one, two, three = tl.sum(at_first), tl.sum(at_second), tl.sum(at_third)
        # The largest of these keys from which on there is enough.
        if three >= need:
            low = third
        elif two >= need:
            low, high, above = second, third - 1, three
        elif one >= need:
            low, high, above = first, second - 1, two
        else:
            high, above = first - 1, one
    last = vocab
    start = 0
    while (start < vocab) & (last == vocab):
        token = start + tl.arange(0, BLOCK)
        _, key = _load_keys(logits, token, vocab)
        worth = _worth(weights, token, (token < vocab) & (key == low), COUNTED)
        reached = (worth > 0) & (above + tl.cumsum(worth, axis=0) >= need)
        last = tl.min(tl.where(reached, token, vocab))
        above += tl.sum(worth)
        start += BLOCK
    return low, last


@triton.jit
def _kept(logits, weights, token, vocab, edge, last, min_weight):
    """The weights of those tokens that are kept, 0 of the others."""
    _, key = _load_keys(logits, token, vocab)
    weight = tl.load(weights + token, mask=token < vocab, other=0)
    inside = (key > edge) | ((key == edge) & (token <= last))
    return tl.where(inside & (weight >= min_weight), weight, 0)


@triton.jit
def _part_of(share, total):
    """Whole units and rest of ``share * total``, in units of 2^DRAW_BITS."""
    share, total = share.to(tl.uint64), total.to(tl.uint64)
    low = share * total
    units = (tl.umulhi(share, total) << _OTHER_BITS) | (low >> _DRAW_BITS)
    rest = low << _OTHER_BITS
    return units.to(tl.int64), rest != 0


@triton.jit
def _draw(logits, weights, vocab, bits, most, least, sharpness, top_k, top_p, min_weight, draw,
          greedy, BLOCK: tl.constexpr):  # fmt: skip
    """The token that a draw picks."""
    edge, last = least, vocab
    if top_k < vocab:
        edge, last = _find_edge(logits, weights, top_k, least, most, vocab, True, BLOCK)
    # The bits of the largest logit.
    bits_of_most = (most ^ ((most >> 63) & 0x7FFFFFFF)).to(tl.int32)
    largest = bits_of_most.to(tl.float32, bitcast=True).to(tl.float64)
    sums = tl.zeros((BLOCK,), tl.int64)
    lowest = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x, key = _load_keys(logits, token, vocab)
        inside = (key > edge) | ((key == edge) & (token <= last))
        weight = tl.where(inside, _weigh(x, largest, sharpness, bits), 0)
        tl.store(weights + token, weight, mask=token < vocab)
        sums += weight
        lowest = tl.minimum(lowest, tl.where(weight > 0, key, 2**31 - 1))
    # What other threads have stored is read from here on.
    tl.debug_barrier()
    edge, last = least, vocab
    if top_p < _WHOLE:
        units, has_rest = _part_of(top_p, tl.sum(sums))
        need = units + has_rest.to(tl.int64)
        low = tl.min(lowest).to(tl.int64)
        edge, last = _find_edge(logits, weights, need, low, most, vocab, False, BLOCK)
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        sums += _kept(logits, weights, token, vocab, edge, last, min_weight)
    total = tl.sum(sums)
    picked = greedy
    if total > 0:
        left, _ = _part_of(draw, total)
        start = 0
        kept = _kept(logits, weights, tl.arange(0, BLOCK), vocab, edge, last, min_weight)
        here = tl.sum(kept)
        while left >= here:
            left -= here
            start += BLOCK
            kept = _kept(
                logits, weights, start + tl.arange(0, BLOCK), vocab, edge, last, min_weight
            )
            here = tl.sum(kept)
        passed = tl.cumsum(kept, axis=0) > left
        picked = tl.min(tl.where(passed, start + tl.arange(0, BLOCK), vocab)).to(tl.int64)
    # The next row writes over the weights.
    tl.debug_barrier()
    return picked


@triton.jit(do_not_specialize=["num_rows", "vocab", "bits"])
def _sample_kernel(
    logits,
    numbers,
    weights,
    tokens,
    row_stride,
    num_rows,
    vocab,
    bits,
    BLOCK: tl.constexpr,
):
    weights += tl.program_id(0).to(tl.int64) * vocab
    row = tl.program_id(0)
    while row < num_rows:
        mine = logits + row.to(tl.int64) * row_stride
        # Key and token in one number: of equal keys the lowest token is the largest.
        best = tl.full((BLOCK,), -(2**63), tl.int64)
        least = tl.full((BLOCK,), 2**31 - 1, tl.int32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            _, key = _load_keys(mine, token, vocab)
            packed = (key.to(tl.int64) << 32) | (2**31 - 1 - token).to(tl.int64)
            real = token < vocab
            best = tl.maximum(best, tl.where(real, packed, -(2**63)))
            least = tl.minimum(least, tl.where(real, key, 2**31 - 1))
        first = tl.max(best)
        most = first >> 32
        picked = 2**31 - 1 - (first & 0xFFFFFFFF)
        sharpness = tl.load(numbers + row).to(tl.float64, bitcast=True)
        if (sharpness > 0) & (most < _INFINITY_KEY) & (most > -_INFINITY_KEY - 1):
            of_row = numbers + row
            picked = _draw(
                mine,
                weights,
                vocab,
                bits,
                most,
                tl.min(least).to(tl.int64),
                sharpness,
                tl.load(of_row + num_rows),
                tl.load(of_row + 2 * num_rows),
                tl.load(of_row + 3 * num_rows),
                tl.load(of_row + 4 * num_rows),
                picked,
                BLOCK,
            )
        tl.store(tokens + row, picked)
        row += tl.num_programs(0)


def pick_tokens(logits: Tensor, numbers: Tensor, bits: int) -> Tensor:
    """Pick as ``moesaic.kernels.sampling.pick_tokens``; never waits for the device.

    Args:
        logits: float32 ``[R, V]``.
        numbers: int64 ``[5, R]``, the rules, as ``RuleNumbers.table`` has them.
        bits: fractional bits of a weight.

    Returns:
        int64 ``[R]``.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    programs = min(num_rows, _PROGRAMS)
    tokens, weights = numbers.new_empty(num_rows), numbers.new_empty(programs, vocab)
    _sample_kernel[(programs,)](
        logits,
        numbers,
        weights,
        tokens,
        logits.stride(0),
        num_rows,
        vocab,
        bits,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16,
        # A fused product and sum is rounded once.
        enable_fp_fusion=False,
    )
    return tokens
