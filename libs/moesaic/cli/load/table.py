"""The table of a load's figures, as ``vllm bench serve`` prints it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
_WIDTH = 50


def table_of(
    figures: Mapping[str, Any],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    rate: float,
    most: int | None,
) -> str:
    """Write the figures as ``vllm bench serve`` prints them.

    Args:
        figures: of ``report_of`` or ``pooling_report_of``.
        metrics: that are shown.
        percentiles: that are shown.
        rate: requests a second that were asked for.
        most: requests in flight that were allowed; None: any number.
    """
    peak = figures.get("max_concurrent_requests")
    rows: list[tuple[str, float | None]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("Maximum request concurrency:", most),
        ("Request rate configured (RPS):", None if math.isinf(rate) else float(rate)),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures.get("total_output_tokens")),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Input throughput (inputs/s):", figures.get("input_sequence_throughput")),
        ("Request goodput (req/s):", figures.get("request_goodput")),
        ("Output token throughput (tok/s):", figures.get("output_throughput")),
        ("Peak output token throughput (tok/s):", figures.get("max_output_tokens_per_s")),
        ("Peak concurrent requests:", None if peak is None else float(peak)),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}", *_lines(rows)]
    for metric in metrics:
        short, title = TITLES[metric]
        parts = {"Mean": "mean", "Median": "median"}
        parts |= {f"P{percentile:g}": f"p{percentile:g}" for percentile in percentiles}
        named = [(f"{k} {short} (ms):", figures[f"{key}_{metric}_ms"]) for k, key in parts.items()]
        lines += [f"{title:-^{_WIDTH}}", *_lines(named)]
    return "\n".join([*lines, "=" * _WIDTH])


def _lines(rows: Sequence[tuple[str, float | None]]) -> list[str]:
    texts = [
        (name, f"{value:.2f}" if isinstance(value, float) else str(value))
        for name, value in rows
        if value is not None
    ]
    return [f"{name:<40} {text:<10}".rstrip() for name, text in texts]
