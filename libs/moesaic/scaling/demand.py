"""Recent demand from what workers report: requests of the last seconds, by one clock."""

import math
from collections.abc import Iterable

import numpy as np

from moesaic.errors import InvalidInput
from moesaic.messages.performance import Arrival, LoadReport
from moesaic.scaling.contract import RecentDemand


def recent_demand(
    arrivals: Iterable[Arrival], now_s: float, window_s: float, usual_answer_tokens: float
) -> RecentDemand:
    """Collect the requests that arrived in the last ``window_s`` seconds.

    Clocks of workers differ: what came a little later than now, came now.

    Args:
        arrivals: in any order; those without a known answer get the usual length.
        now_s: end of the window, in seconds since 1970.
        window_s: its length.
        usual_answer_tokens: tokens of a usual answer.

    Raises:
        InvalidInput: the window has no length, or usual answers no token.
    """
    if not 0 < window_s < math.inf:
        raise InvalidInput("window_s", f"must be positive and finite, got {window_s:g}")
    if not 1 <= usual_answer_tokens < math.inf:
        raise InvalidInput(
            "usual_answer_tokens", f"must be at least 1, got {usual_answer_tokens:g}"
        )
    begin_s, usual = now_s - window_s, round(usual_answer_tokens)
    # Anything later than a whole window is by a clock that says nothing.
    rows = sorted(
        (
            min(each.at, now_s) - begin_s,
            max(1, each.prompt_tokens - each.cached_tokens),
            each.answer_tokens if each.answer_tokens > 0 else usual,
        )
        for each in arrivals
        if begin_s < each.at <= now_s + window_s
    )
    return RecentDemand(
        at_s=np.array([row[0] for row in rows], dtype=np.float64),
        prompt_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        answer_tokens=np.array([row[2] for row in rows], dtype=np.int64),
        window_s=window_s,
    )


def reported_arrivals(reports: Iterable[LoadReport]) -> list[Arrival]:
    """List the arrivals of all reports; those of a report that names only some stand for all of its own.

    The named ones are repeated evenly, each repetition at a time between its own and the next one's.
    """
    found: list[Arrival] = []
    for report in reports:
        named = sorted(report.arrivals, key=lambda each: each.at)
        if report.arrived <= len(named):
            found += named
            continue
        for i, each in enumerate(named):
            times = (i + 1) * report.arrived // len(named) - i * report.arrived // len(named)
            gap_s = (named[i + 1].at if i + 1 < len(named) else max(report.at, each.at)) - each.at
            found += [
                Arrival(
                    each.at + gap_s * j / times,
                    each.prompt_tokens,
                    each.answer_tokens,
                    each.cached_tokens,
                )
                for j in range(times)
            ]
    return found
