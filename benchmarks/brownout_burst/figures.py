"""The figures of an arm, from its requests and from the thresholds meanwhile. Pure: times in, figures out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.brownout_burst.point import BurstPoint
from moesaic.cli.load.generator import TimedRequest

SECOND = 1.0
ENDLESS = float("inf")


@dataclass(frozen=True)
class BurstTargets:
    """Targets of the 90th percentiles of TTFT and TPOT."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class BurstSample:
    """The worker's state at one moment, in seconds from the start of the arm."""

    at_s: float
    prefill: float
    decode: float
    shedding: bool
    requests: int  # that run or wait
    ttft_p90_s: float | None = None  # as the worker measures it, from the submission to it
    tpot_p90_s: float | None = None  # likewise

    @property
    def is_exact(self) -> bool:
        """Nothing is degraded or shed."""
        return self.prefill == 1 and self.decode == 1 and not self.shedding


def p90(values: Sequence[float]) -> float:
    """The value that 90 of 100 do not exceed; 0 of none."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else 0.0


def between(requests: Sequence[TimedRequest], start_s: float, end_s: float) -> list[TimedRequest]:
    """The requests that were due from ``start_s`` to before ``end_s``."""
    return [each for each in requests if start_s <= each.due_s < end_s]


def violations(requests: Sequence[TimedRequest], targets: BurstTargets) -> dict[str, Any]:
    """Count violations, as shares of the requests.

    A request without a whole answer violates both phases. Of tokens, it counts as many late ones as other answers have
    later tokens.
    """
    if not requests:
        return {"requests": 0}
    late = [(r.ttft_s > targets.ttft_s, r.tpot_s > targets.tpot_s) for r in requests]
    answered = [r for r in requests if r.complete]
    gaps = [gap for r in answered for gap in r.gaps_s]
    missing = (len(requests) - len(answered)) * (len(gaps) / len(answered) if answered else 1.0)
    late_tokens = sum(gap > targets.tpot_s for gap in gaps) + missing
    shed = sum(r.was_shed for r in requests)
    return {
        "requests": len(requests),
        "prefill": _part(sum(ttft for ttft, _ in late), len(late)),
        "decode": _part(sum(tpot for _, tpot in late), len(late)),
        "either": _part(sum(ttft or tpot for ttft, tpot in late), len(late)),
        "later_tokens": _part(late_tokens, len(gaps) + missing),
        "shed": _part(shed, len(requests)),
        "failed": _part(len(requests) - len(answered) - shed, len(requests)),
    }


def seconds_over(requests: Sequence[TimedRequest], targets: BurstTargets) -> dict[str, int]:
    """Count the seconds in which more than a tenth of those who came had to wait too long, or in vain."""
    late = [_late(own, targets) for own in _by_second(requests).values()]
    return {
        "ttft": sum(ttft for ttft, _ in late),
        "tpot": sum(tpot for _, tpot in late),
        "either": sum(ttft or tpot for ttft, tpot in late),
    }


def until_exact(samples: Sequence[BurstSample], burst_end_s: float) -> float | None:
    """Seconds from the end of the burst until nothing is degraded or shed for good; none if it never came to that."""
    if not samples or not samples[-1].is_exact:
        return None
    for before, after in zip(reversed(samples[:-1]), reversed(samples), strict=False):
        if not before.is_exact:
            return max(0.0, round(after.at_s - burst_end_s, 1))
    return 0.0


def until_in_time(
    requests: Sequence[TimedRequest], targets: BurstTargets, burst_end_s: float, end_s: float
) -> float | None:
    """Seconds from the end of the burst until no second is over a target any more; none if the last one is."""
    over = [s for s, own in _by_second(requests).items() if any(_late(own, targets))]
    if not over or max(over) + SECOND <= burst_end_s:
        return 0.0
    return None if max(over) + SECOND >= end_s else max(over) + SECOND - burst_end_s


def accuracy(requests: Sequence[TimedRequest]) -> dict[str, Any]:
    """Count right answers, among those given and among all asked for."""
    answered = [r for r in requests if r.complete]
    right = sum(r.right for r in answered)
    return {
        "answered": len(answered),
        "right": _part(right, len(answered)),
        "right_of_asked": _part(right, len(requests)),
    }


def arm_figures(
    requests: Sequence[TimedRequest],
    samples: Sequence[BurstSample],
    targets: BurstTargets,
    point: BurstPoint,
) -> dict[str, Any]:
    """Gather the figures of an arm."""
    before = between(requests, 0, point.calm_s)
    burst = between(requests, point.calm_s, point.burst_end_s)
    after = between(requests, point.burst_end_s, ENDLESS)
    answered = [r for r in burst if r.complete]
    seen = [s for s in samples if point.calm_s <= s.at_s < point.burst_end_s]
    in_time = [r for r in burst if r.ttft_s <= targets.ttft_s and r.tpot_s <= targets.tpot_s]
    return {
        "violations": {
            "burst": violations(burst, targets),
            "before": violations(before, targets),
            "after": violations(after, targets),
        },
        "seconds_over_target": seconds_over(requests, targets),
        "until_exact_s": until_exact(samples, point.burst_end_s),
        "until_in_time_s": until_in_time(requests, targets, point.burst_end_s, point.end_s),
        "accuracy": {"before": accuracy(before), "burst": accuracy(burst)},
        "burst": {
            "answered_per_s": round(len(answered) / point.burst_s, 2),
            "right_in_time_per_s": round(sum(r.right for r in in_time) / point.burst_s, 2),
            "ttft_p50_s": _middle([r.ttft_s for r in answered]),
            "ttft_p90_s": round(p90([r.ttft_s for r in answered]), 4),
            "tpot_p50_s": _middle([r.tpot_s for r in answered]),
            "tpot_p90_s": round(p90([r.tpot_s for r in answered]), 4),
            "worker_ttft_p90_s": _middle([s.ttft_p90_s for s in seen if s.ttft_p90_s is not None]),
            "worker_tpot_p90_s": _middle([s.tpot_p90_s for s in seen if s.tpot_p90_s is not None]),
            "sent_late_p90_s": round(p90([r.sent_s - r.due_s for r in burst]), 4),
            "prefill_threshold": _mean([s.prefill for s in seen]),
            "decode_threshold": _mean([s.decode for s in seen]),
            "lowest_thresholds": [
                round(min((s.prefill for s in seen), default=1.0), 2),
                round(min((s.decode for s in seen), default=1.0), 2),
            ],
            "degraded_share": _mean([r.degraded_share for r in answered]),
        },
    }


def _late(own: Sequence[TimedRequest], targets: BurstTargets) -> tuple[bool, bool]:
    ttft, tpot = p90([r.ttft_s for r in own]), p90([r.tpot_s for r in own])
    return ttft > targets.ttft_s, tpot > targets.tpot_s


def _by_second(requests: Sequence[TimedRequest]) -> dict[float, list[TimedRequest]]:
    found: dict[float, list[TimedRequest]] = {}
    for request in requests:
        found.setdefault(request.due_s // SECOND * SECOND, []).append(request)
    return found


def _part(count: float, of: float) -> float:
    return round(count / of, 4) if of else 0.0


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 4) if values else 1.0


def _middle(values: Sequence[float]) -> float:
    return round(sorted(values)[len(values) // 2], 4) if values else 0.0
