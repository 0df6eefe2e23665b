"""The figures of a load, by the names and definitions of ``vllm bench serve``."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moesaic.cli.load.generator import TimedRequest

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOALS = ("ttft", "tpot", "e2el")
DETAILS = (
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
)
_WIDTH = 50


def output_tokens(request: TimedRequest) -> int:
    """Count the tokens of an answer: as its usage says, else its ids, else its events with text."""
    told = request.usage.get("completion_tokens")
    return int(told or len(request.token_ids) or len(request.text_times))


def report_of(
    requests: Sequence[TimedRequest],
    prompt_tokens: Sequence[int],
    duration_s: float,
    percentiles: Sequence[float],
    goals: Mapping[str, float],
) -> dict[str, Any]:
    """Compute all figures; times of a request count from when it was sent.

    Args:
        requests: with their answers, read.
        prompt_tokens: of each request, for servers that do not report them.
        duration_s: of the load.
        percentiles: of each metric, from 0 to 100.
        goals: largest values in milliseconds by metric, for the goodput.
    """
    done = [each.complete for each in requests]
    inputs = [
        int(each.usage.get("prompt_tokens", known))
        for each, known in zip(requests, prompt_tokens, strict=True)
    ]
    outputs = [output_tokens(each) if each.complete else 0 for each in requests]
    ttfts = [_first_s(each) - each.sent_s if each.complete else 0.0 for each in requests]
    latencies = [each.answered_s - each.sent_s if each.complete else 0.0 for each in requests]
    itls = [[b - a for a, b in pairwise(each.text_times)] for each in requests]
    tpots = [
        (latency - ttft) / (count - 1) if count > 1 else 0.0
        for latency, ttft, count in zip(latencies, ttfts, outputs, strict=True)
    ]
    values = {
        "ttft": [value for value, ok in zip(ttfts, done, strict=True) if ok],
        "tpot": [
            value for value, ok, count in zip(tpots, done, outputs, strict=True) if ok and count > 1
        ],
        "itl": [gap for gaps, ok in zip(itls, done, strict=True) if ok for gap in gaps],
        "e2el": [value for value, ok in zip(latencies, done, strict=True) if ok],
    }
    by_request = {"ttft": ttfts, "tpot": tpots, "e2el": latencies}
    good = sum(
        ok and all(by_request[name][n] * 1000 <= most for name, most in goals.items())
        for n, ok in enumerate(done)
    )
    complete = [each for each in requests if each.complete]
    total_input = sum(count for count, ok in zip(inputs, done, strict=True) if ok)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(requests) - len(complete),
        "total_input_tokens": total_input,
        "total_output_tokens": sum(outputs),
        "request_throughput": len(complete) / duration_s,
        "request_goodput": good / duration_s if goals else None,
        "output_throughput": sum(outputs) / duration_s,
        "total_token_throughput": (total_input + sum(outputs)) / duration_s,
        "input_lens": inputs,
        "output_lens": outputs,
        "ttfts": ttfts,
        "itls": itls,
        "latencies": latencies,
        "start_times": [each.sent_s for each in requests],
        "queue_times": [each.sent_s - each.due_s for each in requests],
        "generated_texts": [each.text for each in requests],
        "errors": [each.error for each in requests],
        "max_output_tokens_per_s": _most_a_second(complete),
        "max_concurrent_requests": _most_at_once(complete),
    }
    for name, seconds in values.items():
        times_ms = np.array(seconds or [0.0]) * 1000
        figures[f"mean_{name}_ms"] = float(times_ms.mean())
        figures[f"median_{name}_ms"] = float(np.median(times_ms))
        figures[f"std_{name}_ms"] = float(times_ms.std())
        for percentile in percentiles:
            value = float(np.percentile(times_ms, percentile))
            figures[f"p{percentile:g}_{name}_ms"] = value
    return figures


def table_of(
    figures: Mapping[str, Any],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    rate: float,
    most: int | None,
) -> str:
    """Write the figures as ``vllm bench serve`` prints them.

    Args:
        figures: of ``report_of``.
        metrics: that are shown.
        percentiles: that are shown.
        rate: requests a second that were asked for.
        most: requests in flight that were allowed; None: any number.
    """
    rows: list[tuple[str, float | None]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("Maximum request concurrency:", most),
        ("Request rate configured (RPS):", None if math.isinf(rate) else float(rate)),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Request goodput (req/s):", figures["request_goodput"]),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}", *_lines(rows)]
    for metric in metrics:
        short, title = METRICS[metric]
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


def _first_s(request: TimedRequest) -> float:
    return (request.text_times or [request.answered_s])[0]


def _most_a_second(requests: Sequence[TimedRequest]) -> float:
    """Find the second, counted from the first request, in which most events with text came."""
    if not requests:
        return 0.0
    start_s = min(each.sent_s for each in requests)
    seconds = [int(at - start_s) for each in requests for at in each.text_times]
    return float(np.bincount(seconds).max()) if seconds else 0.0


def _most_at_once(requests: Sequence[TimedRequest]) -> int:
    """Find how many requests were in flight at most; one that ends when another begins does not count beside it."""
    changes = [(each.sent_s, 1) for each in requests]
    changes += [(each.answered_s, -1) for each in requests]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
