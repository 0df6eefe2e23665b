"""SLO-aware latency control as in the paper (BrownoutServe section IV-E, algorithm 2). Pure.

In each iteration, by the 90th percentile of recent latencies of a phase:

==============================  =======================
Latency                         Threshold
==============================  =======================
below ``warning`` times target  grows by ``increment``
above the target                is multiplied by ``shrink``
otherwise, or without samples   stays
==============================  =======================

Every latency of the window counts, so every iteration reacts to one overload until its latencies
have left the window.
"""

from moesaic.brownout.control.contract import PHASES, Phase, Thresholds
from moesaic.brownout.control.latencies import LatencyWindow
from moesaic.messages.brownout import BrownoutPolicy

_ROUND = 9  # digits: 0.1 added ten times gives 1


def next_threshold(threshold: float, p90_share: float | None, policy: BrownoutPolicy) -> float:
    """Return the threshold after one iteration, before it is bounded from below.

    Args:
        threshold: the threshold in force.
        p90_share: 90th percentile of recent latencies, as a share of the target; ``None``: there are none.
        policy: gives ``warning``, ``increment`` and ``shrink``.
    """
    if p90_share is None:
        return threshold
    if p90_share < policy.warning:
        return min(1.0, round(threshold + policy.increment, _ROUND))
    return threshold * policy.shrink if p90_share > 1 else threshold


def paper_thresholds(
    policy: BrownoutPolicy,
    now_s: float,
    current: Thresholds,
    windows: dict[Phase, LatencyWindow],
) -> Thresholds:
    """Decide one iteration of algorithm 2 for both phases.

    Args:
        policy: in force.
        now_s: the time.
        current: thresholds in force.
        windows: latencies of each phase.
    """
    found: list[float] = []
    for phase, threshold in zip(PHASES, current, strict=True):
        share = windows[phase].p90_share(now_s)
        least = getattr(policy, f"min_{phase}_threshold")
        found.append(max(least, next_threshold(threshold, share, policy)))
    return Thresholds(*found)
