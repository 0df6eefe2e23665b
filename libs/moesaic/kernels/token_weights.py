# Weights of tokens: round(2^bits * e^x), whole numbers.
#   Order      e^x = 2^n * e^r; the series of e^r is products and sums, each rounded. Where none is fused, the bits
#              are the same on every processor and GPU: C and Triton kernels do the same with the same numbers.
"""Weights of tokens, and the numbers of which they are made."""

import math

import torch
from torch import Tensor

DRAW_BITS = 53  # of a draw, as of a top-p
LOG2_E = 1.4426950408889634
LN2 = 6.93147180369123816490e-1, 1.90821492927058770002e-10  # in two parts
SERIES = tuple(1.0 / math.factorial(i) for i in range(12, -1, -1))
# 1.5 * 2^52: a number that it is added to, and then taken from, is rounded to a whole one.
SHIFT = 6755399441055744.0


def weigh(exponents: Tensor, bits: int) -> Tensor:
    """Return ``round(2^bits * e^x)`` of float64 ``[R, V]``, at most 0; 0 of NaN, and of what is below -64."""
    x = torch.where(exponents > -64, exponents, -64.0)
    n = (x * LOG2_E + SHIFT) - SHIFT
    r = (x - n * LN2[0]) - n * LN2[1]
    p = torch.full_like(r, SERIES[0])
    for coefficient in SERIES[1:]:
        p = p * r + coefficient
    power = ((n.long() + (1023 + bits)) << 52).view(torch.float64)
    return (p * power).round().long()
