"""The figures of a run: losses by substitution and threshold, beside the paper's, and which substitution is best."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.brownout_accuracy.arms import Point, rule_of
from benchmarks.brownout_accuracy.instances import Busiest
from benchmarks.brownout_accuracy.losses import (
    Curve,
    Loss,
    Rows,
    common_shares,
    loss_of,
    ranked,
    value_at,
)
from benchmarks.brownout_accuracy.paper import TARGET, WAYS, loss_at
from benchmarks.brownout_accuracy.tasks import CHOICES, RERANK

CHOSEN = (*CHOICES, RERANK)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class SubstitutionResult:
    """A substitution at one threshold, beside no brownout.

    Attributes:
        loss: loss of accuracy, in all sets.
        chosen: the same in sets whose answers are chosen among labels.
        degraded: share of choices.
        perplexity: perplexity of held-out text, over that without brownout.
    """

    loss: Loss
    chosen: Loss
    degraded: float
    perplexity: float


Results = Mapping[
    str, Mapping[float, SubstitutionResult]
]  # by substitution and threshold, the highest first


def results_of(exact: Point, points: Mapping[str, Mapping[float, Point]]) -> Results:
    """Compare all points with no brownout."""

    def result(point: Point) -> SubstitutionResult:
        return SubstitutionResult(
            loss_of(exact.rows, point.rows),
            loss_of(exact.rows, point.rows, CHOSEN),
            point.degraded,
            math.exp(point.cross_entropy - exact.cross_entropy),
        )

    return {
        substitution: {t: result(p) for t, p in own.items()} for substitution, own in points.items()
    }


def figures_of(
    exact: Point, results: Results, mixed: Mapping[tuple[int, float], tuple[Rows, float]]
) -> dict[str, Any]:
    """Gather all figures.

    Args:
        exact: without brownout.
        results: results of all substitutions.
        mixed: results of united experts on mixed batches, by way and threshold.
    """

    def listed(value: Callable[[SubstitutionResult], float]) -> dict[str, list[float]]:
        return {
            substitution: [_short(value(r)) for r in own.values()]
            for substitution, own in results.items()
        }

    return {
        "exact_accuracy": {name: _short(sum(rows) / len(rows)) for name, rows in exact.rows.items()},
        "exact_perplexity": round(math.exp(exact.cross_entropy), 2),
        "average_relative_loss": listed(lambda r: r.loss.average),
        "standard_error": listed(lambda r: r.loss.standard_error),
        "of_choices_alone": listed(lambda r: r.chosen.average),
        "degraded_share": listed(lambda r: r.degraded),
        "perplexity_ratio": listed(lambda r: r.perplexity),
        "relative_loss": {
            substitution: {name: [_short(r.loss.by_set[name]) for r in own.values()] for name in exact.rows}
            for substitution, own in results.items()
        },
        "beside_table_1": _beside_the_table(results),
        "at_paper_points": {
            f"{way}, {t}": {
                **_at_point(way, t, results[f"united-{way}"][t]),
                "in_mixed_batches": {
                    "average_relative_loss": _short(loss_of(exact.rows, rows).average),
                    "degraded_share": _short(degraded),
                },
            }
            for (way, t), (rows, degraded) in mixed.items()
        },
        "training_free": _training_free(results),
    }  # fmt: skip


def _beside_the_table(results: Results) -> dict[str, Any]:
    columns = {**{f"united-{way}": way for way in WAYS}, "nothing": 0}
    return {
        substitution: {
            "here": [_short(r.loss.average) for r in results[substitution].values()],
            "paper": [loss_at(way, t) for t in results[substitution]],
        }
        for substitution, way in columns.items()
        if substitution in results
    }


def _at_point(way: int, threshold: float, result: SubstitutionResult) -> dict[str, Any]:
    return {
        "average_relative_loss": _short(result.loss.average),
        "standard_error": _short(result.loss.standard_error),
        "paper": loss_at(way, threshold),
        "of_choices_alone": _short(result.chosen.average),
        "degraded_share": _short(result.degraded),
        "perplexity_ratio": _short(result.perplexity),
        "is_within_target": result.loss.average <= TARGET,
    }


def _training_free(results: Results) -> dict[str, Any]:
    """Order the substitutions without distillation by what they lose at the same shares of degraded choices."""
    free = {
        substitution: own
        for substitution, own in results.items()
        if not substitution.startswith("united-")
    }
    losses = {
        substitution: _curve(own, lambda r: r.loss.average) for substitution, own in free.items()
    }
    texts = {
        substitution: _curve(own, lambda r: math.log(r.perplexity))
        for substitution, own in free.items()
    }
    shares = common_shares(losses, SHARES)
    by_loss, by_text = ranked(losses, shares), ranked(texts, shares)
    return {
        "shares": shares,
        "loss_at_share": {
            substitution: _at(losses[substitution], shares) for substitution in by_loss
        },
        "mean_loss": {substitution: _short(loss) for substitution, loss in by_loss.items()},
        "mean_perplexity_ratio": {
            substitution: _short(math.exp(log)) for substitution, log in by_text.items()
        },
        "best": next(iter(by_loss)),
    }


def by_rule_of(
    results: Results, busiest: Mapping[str, Mapping[str, Sequence[Busiest]]]
) -> dict[str, Any]:
    """Compare the rules by which experts stay, at the same shares of degraded choices.

    Args:
        results: results of all substitutions.
        busiest: by kind of step and substitution, from the least degraded on.
    """
    told: dict[str, Any] = {}
    for base in {
        rule_of(substitution)[0]: None
        for substitution in results
        if substitution.startswith("united-")
    }:
        substitutions = {
            rule: substitution
            for substitution in results
            for own, rule in [rule_of(substitution)]
            if own == base
        }
        losses = {
            r: _curve(results[substitution], lambda r: r.loss.average)
            for r, substitution in substitutions.items()
        }
        counts = {
            kind: {
                r: [(b.degraded, b.experts) for b in own[substitution]]
                for r, substitution in substitutions.items()
            }
            for kind, own in busiest.items()
        }
        shares = common_shares(losses, SHARES)
        for each in counts.values():
            shares = [share for share in shares if share in common_shares(each, SHARES)]
        told[base] = {
            "shares": shares,
            "loss": {rule: _at(curve, shares) for rule, curve in losses.items()},
            "busiest": {
                kind: {rule: _at(curve, shares) for rule, curve in own.items()}
                for kind, own in counts.items()
            },
        }
    return told


def drawn_of(busiest: Mapping[str, Mapping[str, Sequence[Busiest]]]) -> dict[str, Any]:
    """Compare the rules on drawn batches, at the same shares of degraded choices."""
    told = {}
    for case, by_rule in busiest.items():
        curves: dict[str, Curve] = {
            rule: [(b.degraded, b.experts) for b in own] for rule, own in by_rule.items()
        }
        shares = common_shares(curves, SHARES)
        told[case] = {"shares": shares, **{r: _at(curve, shares) for r, curve in curves.items()}}
    return told


def _curve(
    own: Mapping[float, SubstitutionResult], value: Callable[[SubstitutionResult], float]
) -> Curve:
    """A value by the share of degraded choices; where nothing is degraded, nothing is lost."""
    return [(0.0, 0.0), *sorted((r.degraded, value(r)) for r in own.values())]


def _at(curve: Curve, shares: list[float]) -> list[float]:
    return [_short(value_at(curve, share)) for share in shares]


def _short(value: float) -> float:
    return round(value, 4)
