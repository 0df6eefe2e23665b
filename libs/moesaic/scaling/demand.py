"""Recent demand from what workers report: requests of the last seconds, by one clock."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from moesaic.errors import InvalidInput
from moesaic.messages.performance import Arrival, LoadReport
from moesaic.scaling.contract import RecentDemand

MOST_ARRIVALS = 100_000  # that are repeated: reports may be wrong, and a choice takes time
SLACK_S = 0.1  # between two reports of one worker, which each clock sees a little differently


def recent_demand(
    arrivals: Iterable[Arrival], now_s: float, window_s: float, usual_answer_tokens: float
) -> RecentDemand:
    """Collect the requests that arrived in the last ``window_s`` seconds.

    Clocks of workers differ: what came a little later than now, came now.

    Args:
        arrivals: requests in any order; those with unknown answers get the usual length.
        now_s: end of the window, in seconds since 1970.
        window_s: length of the window.
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


def covered_spans(
    reports: Iterable[LoadReport], worker_ids: Iterable[str], now_s: float, window_s: float
) -> list[tuple[float, float]]:
    """Find the times within the last ``window_s`` seconds that the reports of all these workers cover.

    Times of which nothing is known must not count as times without requests.

    Returns:
        Begin and end of each span, in order; none where there is no worker.
    """
    by_worker: dict[str, list[tuple[float, float]]] = {each: [] for each in worker_ids}
    for report in reports:
        if report.worker_id in by_worker:
            by_worker[report.worker_id].append((report.at - report.window_s, report.at))
    begin_s, edges = now_s - window_s, list[tuple[float, int]]()
    for spans in by_worker.values():
        for begin, end in _united(spans):
            if end > begin_s:
                edges += [(max(begin, begin_s), 1), (end, -1)]
    found: list[tuple[float, float]] = []
    since, telling = 0.0, 0
    for at, change in sorted(edges):
        if telling == len(by_worker) and at > since:
            found.append((since, at))
        telling, since = telling + change, at
    return found


def without_gaps(
    arrivals: Iterable[Arrival], spans: Sequence[tuple[float, float]], now_s: float
) -> list[Arrival]:
    """Take the arrivals within spans, as if these followed each other until now."""
    found: list[Arrival] = []
    left = sum(end - begin for begin, end in spans)
    shifts: list[float] = []
    for begin, end in spans:
        shifts.append(now_s - left - begin)
        left -= end - begin
    begins = [begin for begin, _ in spans]
    for each in arrivals:
        # Spans are open at their begin.
        i = bisect_left(begins, each.at) - 1
        if i >= 0 and each.at <= spans[i][1]:
            rest = each.prompt_tokens, each.answer_tokens, each.cached_tokens
            found.append(Arrival(each.at + shifts[i], *rest))
    return found


def _united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    united: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1] + SLACK_S:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((begin, end))
    return united


def reported_arrivals(reports: Iterable[LoadReport]) -> list[Arrival]:
    """List the arrivals of all reports; those of a report that names only some stand for all of its own.

    The named ones are repeated evenly, each repetition at a time between its own and the next one's. Beyond
    ``MOST_ARRIVALS`` only those that are named are listed.
    """
    found: list[Arrival] = []
    more = MOST_ARRIVALS
    for report in reports:
        named = sorted(report.arrivals, key=lambda each: each.at)
        more -= max(0, report.arrived - len(named))
        if report.arrived <= len(named) or more < 0:
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
