"""The gateway's metrics under the names that vLLM gives them, for dashboards that were made for vLLM.

They are read from the gateway's own series when somebody scrapes, so nothing is counted twice.
"""

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moesaic.prefix.router import PrefixRouter
from moesaic.services.gateway import metrics

_LABELS = ["model_name", "engine"]
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": metrics.ttft_s,
    "vllm:inter_token_latency_seconds": metrics.itl_s,
    "vllm:time_per_output_token_seconds": metrics.itl_s,  # the older name
    "vllm:e2e_request_latency_seconds": metrics.e2e_s,
}
COUNTERS = {
    "vllm:prompt_tokens": metrics.prompt_tokens,
    "vllm:prompt_tokens_cached": metrics.prompt_tokens_cached,
    "vllm:generation_tokens": metrics.generation_tokens,
    "vllm:prefix_cache_queries": metrics.prompt_tokens,
    "vllm:prefix_cache_hits": metrics.prompt_tokens_cached,
}
_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length"}
_OUTCOMES = {"cancelled": "abort", "errored": "error"}


class VllmNames(Collector):
    """Collects what vLLM's dashboards ask for, as far as a gateway knows it.

    Args:
        model: the served model's name.
        router: tells the requests that run and that wait.
    """

    def __init__(self, model: str, router: PrefixRouter) -> None:
        self._model, self._router = model, router
        self._values = [model, "0"]

    def describe(self) -> Iterator[Metric]:
        """Name the metrics; the registry asks for nothing when it takes this collector."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """See ``Collector.collect``."""
        yield from self._gauges()
        for name, histogram in HISTOGRAMS.items():
            yield self._histogram(name, histogram)
        for name, counter in COUNTERS.items():
            family = CounterMetricFamily(name, _text(counter), labels=_LABELS)
            of_model = metrics.sums(counter, "total", model=self._model)
            family.add_metric(self._values, of_model[""])
            yield family
        yield self._finished()

    def _gauges(self) -> Iterator[Metric]:
        # Other threads change these meanwhile; a copy of the values does not.
        running = sum(worker.num_began for worker in list(self._router.fleet.workers.values()))
        waiting = self._router.num_queued + len(self._router.fleet.routed) - running
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that workers compute", running),
            ("vllm:num_requests_waiting", "Sequences that wait, here or at workers", waiting),
        ):
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            family.add_metric(self._values, max(0, value))
            yield family

    def _histogram(self, name: str, histogram: prometheus_client.Histogram) -> Metric:
        buckets = metrics.sums(histogram, "bucket", "le", model=self._model)
        total = metrics.sums(histogram, "sum", model=self._model)[""]
        family = HistogramMetricFamily(name, _text(histogram), labels=_LABELS)
        if buckets:
            family.add_metric(self._values, list(buckets.items()), total)
        return family

    def _finished(self) -> Metric:
        text = "Requests that ended, by finish reason; generated answers count one by one"
        family = CounterMetricFamily(
            "vllm:request_success", text, labels=[*_LABELS, "finished_reason"]
        )
        counts = dict.fromkeys((*_REASONS.values(), *_OUTCOMES.values()), 0.0)
        for reason, value in metrics.sums(metrics.answers_finished, "total", "reason").items():
            counts[_REASONS[reason]] += value
        by_outcome = metrics.sums(metrics.requests, "total", "outcome", model=self._model)
        for outcome, reason in _OUTCOMES.items():
            counts[reason] += by_outcome[outcome]
        for reason, value in counts.items():
            family.add_metric([*self._values, reason], value)
        return family


def _text(metric: prometheus_client.Counter | prometheus_client.Histogram) -> str:
    return next(iter(metric.collect())).documentation
