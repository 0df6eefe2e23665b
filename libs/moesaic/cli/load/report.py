"""The figures of a load, by the names and definitions of ``vllm bench serve``."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moesaic.cli.load.datasets.prompt import LoadPrompt
from moesaic.cli.load.generator import TimedRequest

Tokens = Callable[[str], int]


def output_tokens(request: TimedRequest, tokens: Tokens | None = None) -> int:
    """Count the tokens of an answer: as its usage says, else its ids, else its text, else its events with text."""
    told = request.usage.get("completion_tokens") or len(request.token_ids)
    if not told and tokens is not None:
        told = tokens(request.text)
    return int(told or len(request.text_times))


def report_of(
    requests: Sequence[TimedRequest],
    prompt_tokens: Sequence[int],
    duration_s: float,
    percentiles: Sequence[float],
    goals: Mapping[str, float],
    tokens: Tokens | None = None,
) -> dict[str, Any]:
    """Compute all figures of generated answers; times of a request count from when it was sent.

    Args:
        requests: with their answers, read.
        prompt_tokens: of each request, for servers that do not report them.
        duration_s: of the load.
        percentiles: of each metric, from 0 to 100.
        goals: largest values in milliseconds by metric, for the goodput.
        tokens: counts those of a text, for servers that do not report them.
    """
    done = [each.complete for each in requests]
    inputs = _input_tokens(requests, prompt_tokens)
    outputs = [output_tokens(each, tokens) if each.complete else 0 for each in requests]
    ttfts = [_first_s(each) - each.sent_s if each.complete else 0.0 for each in requests]
    latencies = _latencies(requests)
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
        **_of_requests(requests),
    }
    by_request = {"ttft": ttfts, "tpot": tpots, "e2el": latencies}
    good = sum(
        ok and all(by_request[name][n] * 1000 <= most for name, most in goals.items())
        for n, ok in enumerate(done)
    )
    complete = [each for each in requests if each.complete]
    total_input = sum(count for count, ok in zip(inputs, done, strict=True) if ok)
    return {
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
        **_percentiles(values, percentiles),
    }


def pooling_report_of(
    requests: Sequence[TimedRequest],
    prompts: Sequence[LoadPrompt],
    duration_s: float,
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Compute all figures of embeddings, likewise."""
    complete = [each for each in requests if each.complete]
    inputs = _input_tokens(requests, [each.prompt_tokens for each in prompts])
    counted = [each for each in zip(requests, inputs, prompts, strict=True) if each[0].complete]
    total_input = sum(tokens for _, tokens, _ in counted)
    sequences = sum(prompt.prompts for _, _, prompt in counted)
    return {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(requests) - len(complete),
        "total_input_tokens": total_input,
        "total_input_sequences": sequences,
        "request_throughput": len(complete) / duration_s,
        "input_sequence_throughput": sequences / duration_s,
        "total_token_throughput": total_input / duration_s,
        "input_lens": inputs,
        "latencies": _latencies(requests),
        "queue_times": [each.sent_s - each.due_s for each in requests],
        "errors": [each.error for each in requests],
        **_percentiles(_of_requests(requests), percentiles),
    }


def _of_requests(requests: Sequence[TimedRequest]) -> dict[str, list[float]]:
    """List the metrics that embeddings have too, of whole answers, in seconds."""
    complete = [each for each in requests if each.complete]
    return {
        "e2el": [each.answered_s - each.sent_s for each in complete],
        "client_queue_time": [each.sent_s - each.due_s for each in complete],
        "e2el_including_client_queue": [each.answered_s - each.due_s for each in complete],
    }


def _input_tokens(requests: Sequence[TimedRequest], known: Sequence[int]) -> list[int]:
    both = zip(requests, known, strict=True)
    return [int(each.usage.get("prompt_tokens") or tokens) for each, tokens in both]


def _latencies(requests: Sequence[TimedRequest]) -> list[float]:
    return [each.answered_s - each.sent_s if each.complete else 0.0 for each in requests]


def _percentiles(
    values: Mapping[str, Sequence[float]], percentiles: Sequence[float]
) -> dict[str, float]:
    figures = {}
    for name, seconds in values.items():
        times_ms = np.array(seconds or [0.0]) * 1000
        figures[f"mean_{name}_ms"] = float(times_ms.mean())
        figures[f"median_{name}_ms"] = float(np.median(times_ms))
        figures[f"std_{name}_ms"] = float(times_ms.std())
        for percentile in percentiles:
            value = float(np.percentile(times_ms, percentile))
            figures[f"p{percentile:g}_{name}_ms"] = value
    return figures


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
