"""Drawn traffic, in which some experts are liked more than others."""

from collections.abc import Iterable

import numpy as np

from moesaic.messages.activation import ActivationWindow
from moesaic.placement.traffic.statistics import LayerTraffic, Statistics


def statistics_of(windows: Iterable[ActivationWindow], num_experts: int) -> Statistics:
    """Add up some windows, oldest first."""
    total = Statistics(num_experts, {})
    for window in windows:
        total = total.plus(window)
    return total


def traffic_of(num_experts: int, seed: int, num_batches: int = 6) -> LayerTraffic:
    rng = np.random.default_rng(seed)
    liking = rng.gumbel(size=num_experts)
    scores = liking + rng.gumbel(size=(num_batches * 8, num_experts))
    rows = np.argsort(-scores, axis=1)[:, : min(3, num_experts)]
    return LayerTraffic.of_batches(np.split(rows, num_batches), num_experts)
