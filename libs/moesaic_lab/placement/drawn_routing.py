"""Routing to study fleets with, where nobody has recorded any: skewed, and alike for rows of one topic.

An expert of popularity rank ``r`` is drawn in proportion to ``r ** -skew``; each topic raises and lowers experts by a
normal factor of its own. A row draws its experts without replacement. So experts of one topic are active together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]  # [rows, k]: the experts of each row of one layer, heaviest first


@dataclass(frozen=True)
class RoutingSkew:
    """Measures of unevenness.

    Attributes:
        skew: exponent of popularity; 0: all experts alike. 0.5 has the busiest of 160 experts chosen about five times
            as often as the mean.
        topics: that rows belong to, all as likely.
        topicality: standard deviation of a topic's factors, as logarithms.
    """

    skew: float = 0.5
    topics: int = 16
    topicality: float = 1.0


def draw_layers(
    num_layers: int,
    num_rows: int,
    num_experts: int,
    top_k: int,
    seed: int,
    skew: RoutingSkew | None = None,
) -> list[Rows]:
    """Draw the rows of some layers; each layer has popular experts of its own.

    Args:
        num_layers: layers.
        num_rows: of each.
        num_experts: of each.
        top_k: experts of a row.
        seed: the same draws the same rows.
        skew: None: as ``RoutingSkew`` has it.
    """
    random, of = np.random.default_rng(seed), skew or RoutingSkew()
    return [_layer(num_rows, num_experts, top_k, of, random) for _ in range(num_layers)]


def _layer(
    num_rows: int, num_experts: int, top_k: int, of: RoutingSkew, random: np.random.Generator
) -> Rows:
    popularity = -of.skew * np.log(random.permutation(num_experts) + 1.0)
    topics = of.topicality * random.standard_normal((of.topics, num_experts))
    # The largest of log-weights with Gumbel noise are a draw without replacement.
    logits = popularity + topics[random.integers(of.topics, size=num_rows)]
    logits += random.gumbel(size=logits.shape)
    found: NDArray[Any] = np.argsort(-logits, axis=1)[:, :top_k]
    return found.astype(np.int64)
