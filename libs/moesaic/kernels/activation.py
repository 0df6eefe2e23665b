"""The activations between the two products of a gated MLP. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClampedSwiglu:
    """``gate * sigmoid(slope * gate) * (up + 1)``, with gates up to ``limit`` and ups within it on both sides.

    As in gpt-oss (arXiv:2508.10925). Where a function takes one or None, None is SwiGLU: ``silu(gate) * up``.
    """

    slope: float
    limit: float
