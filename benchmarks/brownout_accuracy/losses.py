"""Losses of accuracy, and how substitutions compare at an equal share of degraded choices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

Rows = Mapping[str, Sequence[bool]]  # of each set, whether each row was answered right
Curve = Sequence[tuple[float, float]]  # share of degraded choices, ascending, and a value


@dataclass(frozen=True)
class Loss:
    """Accuracy lost, as a part of that without brownout.

    Attributes:
        by_set: less than 0 where brownout happens to answer better.
        average: mean of the sets.
        standard_error: standard error of the average, from the paired differences of rows.
    """

    by_set: Mapping[str, float]
    average: float
    standard_error: float


def loss_of(exact: Rows, degraded: Rows, sets: Sequence[str] | None = None) -> Loss:
    """Compare the same rows with and without brownout, in some sets or in all."""
    by_set, variances = {}, []
    for name in exact if sets is None else sets:
        accuracy = fmean(exact[name])
        differences = [a - b for a, b in zip(exact[name], degraded[name], strict=True)]
        by_set[name] = fmean(differences) / accuracy
        variances.append((pstdev(differences) / accuracy) ** 2 / len(differences))
    error = math.sqrt(sum(variances)) / len(variances)
    return Loss(by_set, fmean(by_set.values()), error)


def value_at(curve: Curve, share: float) -> float:
    """Find the value of a curve at a share within it, on straight lines between its points."""
    for (left, low), (right, high) in pairwise(curve):
        if left <= share <= right:
            part = (share - left) / (right - left) if right > left else 0.0
            return low + part * (high - low)
    raise ValueError(f"no point beyond {share}")


def common_shares(curves: Mapping[str, Curve], shares: Sequence[float]) -> list[float]:
    """Select those of the shares that all curves reach."""
    reached = min(curve[-1][0] for curve in curves.values())
    return [share for share in shares if share <= reached]


def ranked(curves: Mapping[str, Curve], shares: Sequence[float]) -> dict[str, float]:
    """Order curves by their mean value at the same shares, the least first."""
    means = {name: fmean(value_at(curve, s) for s in shares) for name, curve in curves.items()}
    return dict(sorted(means.items(), key=lambda item: item[1]))
