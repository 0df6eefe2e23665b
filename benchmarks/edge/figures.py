"""The figures of stretches, from answers and counts. Pure: times in, figures out."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.edge.counts import SiteCounts, added
from benchmarks.edge.load import EdgeAnswer
from benchmarks.edge.stretch import EdgeStretch

BASELINE, OPTIMUM = "eplb", "optimal"


def stretch_figures(stretch: EdgeStretch, choices_per_token: int) -> dict[str, Any]:
    """Gather the figures of one stretch.

    Args:
        stretch: stretch whose answers and counts are reported.
        choices_per_token: experts that a token chooses in all layers together.
    """
    answered = [each for each in stretch.answers if each.request.complete]
    latencies = [each.request.latency_s for each in answered]
    by_site = [_latencies_of(answered, site) for site in range(len(stretch.counts))]
    counts = added(stretch.counts)
    tokens = counts.choices / choices_per_token
    return {
        "requests": len(stretch.answers),
        "failed_requests": len(stretch.answers) - len(answered),
        "mean_latency_s": mean(latencies),
        "latency_p50_s": round(median(latencies), 4) if latencies else None,
        "mean_latency_s_by_server": [mean(own) for own in by_site],
        "local_share": share(counts),
        "local_share_by_server": [share(own) for own in stretch.counts],
        "remote_calls": counts.remote,
        "remote_calls_per_token": round(counts.remote / tokens, 3) if tokens else None,
        "messages_per_token": round(counts.messages / tokens, 3) if tokens else None,
        "from_files": counts.cached + counts.loaded,
        "away_share": round(counts.away_s / counts.layers_s, 3) if counts.layers_s else None,
        "degraded_share": mean([each.request.degraded_share for each in answered]),
    }


def over_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the figures of one policy's rounds: sums of counts, means of all else, and the spread.

    Args:
        rounds: figures of rounds, from ``stretch_figures``.
    """
    joined: dict[str, Any] = {}
    for key, first in rounds[0].items():
        values = [each[key] for each in rounds]
        if isinstance(first, list):
            joined[key] = [mean(of_server) for of_server in zip(*values, strict=True)]
        elif key in ("requests", "failed_requests", "remote_calls", "from_files"):
            joined[key] = sum(values)
        else:
            joined[key] = mean(values)
    found = [each["mean_latency_s"] for each in rounds if each["mean_latency_s"] is not None]
    return {**joined, "mean_latency_s_of_rounds": [min(found), max(found)] if found else None}


def compared(by_policy: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Set the figures of every policy beside those of ``eplb`` and of ``optimal``."""
    base, best = by_policy[BASELINE], by_policy[OPTIMUM]
    return {
        policy: {
            **own,
            "ratio_vs_eplb": ratio(own["mean_latency_s"], base["mean_latency_s"]),
            "remote_calls_over_optimum": ratio(own["remote_calls"], best["remote_calls"]),
        }
        for policy, own in by_policy.items()
    }


def between(answers: Sequence[EdgeAnswer], start_s: float, end_s: float) -> list[EdgeAnswer]:
    """Choose the answers to requests that were due from ``start_s`` to before ``end_s``."""
    return [each for each in answers if start_s <= each.arrival.due_s < end_s]


def mean_latency(answers: Sequence[EdgeAnswer]) -> float | None:
    """Mean of those that were answered; None if none was."""
    return mean([each.request.latency_s for each in answers if each.request.complete])


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values there are; None if there is none."""
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def ratio(value: float | None, base: float | None) -> float | None:
    """Divide; None where that cannot be done."""
    return round(value / base, 3) if value is not None and base else None


def share(counts: SiteCounts) -> float | None:
    """Round the local share of counts."""
    found = counts.local_share
    return None if found is None else round(found, 4)


def _latencies_of(answered: Sequence[EdgeAnswer], site: int) -> list[float | None]:
    return [each.request.latency_s for each in answered if each.arrival.site == site]
