"""Series of the load of experts: one a layer, and one for each of the most chosen experts of the last window."""

import heapq
from collections.abc import Iterator

import numpy as np
from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from moesaic.messages.activation import ActivationWindow

_choices = Counter(
    "moesaic_layer_expert_choices", "Expert choices of rows by decoder layer", ["layer"]
)
_imbalance = Gauge(
    "moesaic_layer_expert_imbalance_ratio",
    "Choices of the most chosen expert of a layer, relative to the mean of its experts, in the last window",
    ["layer"],
)


class _MostChosen(Collector):
    """Shows the rates of one window together; a scrape sees all of one window."""

    def __init__(self) -> None:
        self.rates: list[tuple[float, int, int]] = []  # of layer and expert
        REGISTRY.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See ``Collector.collect``."""
        family = GaugeMetricFamily(
            "moesaic_expert_choices_per_second",
            "Choices of an expert in the last window; only the most chosen experts, --expert-load-series of them",
            labels=["layer", "expert"],
        )
        for rate, layer, expert in self.rates:
            family.add_metric([str(layer), str(expert)], rate)
        yield family


_most_chosen = _MostChosen()


def show_load(window: ActivationWindow, num_series: int) -> None:
    """Show a window of choices, which may be empty.

    Args:
        window: choices of one worker.
        num_series: experts with a series of their own; those that were chosen most, ties to the lower ids.
    """
    chosen: list[tuple[int, int, int]] = []
    for seen in window.layers:
        counts = np.asarray(seen.tokens, np.int64)
        total = int(counts.sum())
        _choices.labels(str(seen.layer)).inc(total)
        if total:
            _imbalance.labels(str(seen.layer)).set(float(counts.max()) * len(counts) / total)
        most = np.argsort(-counts, kind="stable")[:num_series]
        chosen += [(int(counts[e]), -seen.layer, -int(e)) for e in most if counts[e]]
    _most_chosen.rates = [
        (count / window.window_s, -layer, -expert)
        for count, layer, expert in heapq.nlargest(num_series, chosen)
        if window.window_s > 0
    ]
