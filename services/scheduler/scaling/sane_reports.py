"""Bounds of reported numbers: impossible ones harm neither this process nor its decisions."""

import math
from itertools import chain

from msgspec.structs import replace

from moesaic.messages.performance import Arrival, FitSums, LoadReport

AHEAD_S = 60.0  # that a worker's clock may be before ours
MOST_TOKENS = 1 << 24  # of one request
MOST_REQUESTS = 10_000  # that one report can stand for
_MOST_WAITING = 1_000_000


def sane(report: LoadReport, now_s: float) -> LoadReport | None:
    """Return a report with its numbers within bounds; None if it is inconsistent."""
    if not (math.isfinite(report.at) and 0 < report.at <= now_s + AHEAD_S):
        return None
    if not math.isfinite(report.window_s):
        return None
    if not all(map(_is_true, report.arrivals)):
        return None
    times = chain.from_iterable((each.ttft_s, each.tpot_s) for each in report.latencies)
    # Endless ones are of requests that failed; of NaN no comparison is true.
    if not all(each >= 0 for each in times):
        return None
    return replace(
        report,
        waiting=max(0, min(report.waiting, _MOST_WAITING)),
        arrivals=report.arrivals[-MOST_REQUESTS:],
        arrived=max(0, min(report.arrived, MOST_REQUESTS)),
        latencies=report.latencies[-MOST_REQUESTS:],
        ended=max(0, min(report.ended, MOST_REQUESTS)),
        costs={part: sums for part, sums in report.costs.items() if _is_finite(sums)},
    )


def _is_true(arrival: Arrival) -> bool:
    tokens = arrival.prompt_tokens, arrival.answer_tokens, arrival.cached_tokens
    return math.isfinite(arrival.at) and all(0 <= each <= MOST_TOKENS for each in tokens)


def _is_finite(sums: FitSums) -> bool:
    numbers = chain(
        *sums.products, sums.responses, (sums.squares, sums.weight, sums.squared_weight)
    )
    return all(map(math.isfinite, numbers))
