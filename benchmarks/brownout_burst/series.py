"""Latencies, thresholds and rates of an arm over time, for pictures."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.brownout_burst.figures import BurstSample, between, p90
from moesaic.cli.load.generator import TimedRequest

STEP_S = 2.0


def series_of(
    requests: Sequence[TimedRequest], samples: Sequence[BurstSample], end_s: float
) -> dict[str, Any]:
    """Gather lists by steps of two seconds.

    Latencies are 90th percentiles of the requests that were due in a step and were answered; nothing where there were
    none. Thresholds are means of what was seen.
    """
    steps = [at * STEP_S for at in range(round(end_s / STEP_S))]
    due = [between(requests, at, at + STEP_S) for at in steps]
    seen = [[s for s in samples if at <= s.at_s < at + STEP_S] for at in steps]
    answered = [[r for r in own if r.complete] for own in due]

    def latency(value: Callable[[TimedRequest], float]) -> list[float | None]:
        return [round(p90([value(r) for r in own]), 4) if own else None for own in answered]

    def threshold(value: Callable[[BurstSample], float]) -> list[float | None]:
        return [round(fmean(value(s) for s in own), 3) if own else None for own in seen]

    return {
        "step_s": STEP_S,
        "due_per_s": [len(own) / STEP_S for own in due],
        "unanswered_per_s": [
            (len(own) - len(given)) / STEP_S for own, given in zip(due, answered, strict=True)
        ],
        "ttft_p90_s": latency(lambda r: r.ttft_s),
        "tpot_p90_s": latency(lambda r: r.tpot_s),
        "prefill_threshold": threshold(lambda s: s.prefill),
        "decode_threshold": threshold(lambda s: s.decode),
    }
