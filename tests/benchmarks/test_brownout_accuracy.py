"""Losses of accuracy under brownout, and the order of substitutions, from made-up answers."""

import pytest

from benchmarks.brownout_accuracy.arms import Point
from benchmarks.brownout_accuracy.figures import by_rule_of, figures_of, results_of
from benchmarks.brownout_accuracy.instances import Busiest
from benchmarks.brownout_accuracy.losses import common_shares, loss_of, ranked, value_at

EXACT = {"a": [True, True, True, False], "b": [True, True]}


def test_a_loss_is_a_part_of_the_accuracy_without_brownout() -> None:
    loss = loss_of(EXACT, {"a": [True, False, True, False], "b": [True, True]})

    assert loss.by_set == {"a": pytest.approx(1 / 3), "b": 0}
    assert loss.average == pytest.approx(1 / 6)


def test_more_right_answers_are_a_loss_below_nothing() -> None:
    loss = loss_of(EXACT, {"a": [True, True, True, True], "b": [True, True]})

    assert loss.by_set["a"] == pytest.approx(-1 / 3)


def test_sets_weigh_alike_however_many_rows_they_have() -> None:
    loss = loss_of({"a": [True] * 100, "b": [True]}, {"a": [True] * 100, "b": [False]})

    assert loss.average == pytest.approx(0.5)


def test_a_loss_can_be_of_some_sets_alone() -> None:
    loss = loss_of(EXACT, {"a": [False] * 4, "b": [True, False]}, ["b"])

    assert loss.by_set == {"b": 0.5}
    assert loss.average == 0.5


def test_the_standard_error_is_of_paired_rows() -> None:
    same = loss_of(EXACT, EXACT)
    some = loss_of({"a": [True] * 4}, {"a": [True, False, True, False]})

    assert same.standard_error == 0
    assert some.standard_error == pytest.approx(0.5 / 4**0.5)


@pytest.mark.parametrize(
    ("share", "value"), [(0, 0), (0.25, 0.05), (0.5, 0.1), (0.75, 0.4), (1, 0.7)]
)
def test_curves_are_straight_between_their_points(share: float, value: float) -> None:
    assert value_at([(0, 0), (0.5, 0.1), (1, 0.7)], share) == pytest.approx(value)


def test_nothing_is_said_beyond_the_last_point_of_a_curve() -> None:
    with pytest.raises(ValueError, match=r"beyond 0\.8"):
        value_at([(0, 0), (0.7, 0.1)], 0.8)


def test_curves_are_ordered_by_their_means_at_shares_that_all_reach() -> None:
    curves = {"steep": [(0.0, 0.0), (1.0, 0.8)], "flat": [(0.0, 0.0), (0.5, 0.1)]}

    shares = common_shares(curves, (0.2, 0.4, 0.6))

    assert shares == [0.2, 0.4]
    means = ranked(curves, shares)
    assert list(means) == ["flat", "steep"]
    assert means == pytest.approx({"flat": 0.06, "steep": 0.24})


SETS = ("clinc_domain", "banking77", "clinc150", "predicates", "multi", "who", "what", "how many",
        "look up", "kinds", "levels", "rerank", "sums")  # fmt: skip


def point(right: int, degraded: float, cross_entropy: float) -> Point:
    rows = {name: [n < right for n in range(10)] for name in SETS}
    return Point(rows, degraded, cross_entropy)


def test_figures_stand_beside_the_papers_and_name_the_best_substitution_without_distillation() -> (
    None
):
    exact = point(10, 0.0, 4.0)
    by_substitution = {
        "united-2": {0.4: point(10, 0.5, 4.1), 0.0: point(9, 0.9, 4.2)},
        "mean-2": {0.4: point(8, 0.5, 4.2), 0.0: point(6, 0.9, 4.5)},
        "nothing": {0.4: point(5, 0.6, 5.0), 0.0: point(1, 1.0, 7.0)},
    }
    mixed = {(2, 0.0): (point(8, 0.9, 4.2).rows, 0.95)}

    figures = figures_of(exact, results_of(exact, by_substitution), mixed)

    assert figures["average_relative_loss"]["mean-2"] == [0.2, 0.4]
    assert figures["relative_loss"]["united-2"]["sums"] == [0, 0.1]
    assert figures["beside_table_1"]["nothing"] == {"here": [0.5, 0.9], "paper": [0.3507, 1.0]}
    at_point = figures["at_paper_points"]["2, 0.0"]
    assert (at_point["average_relative_loss"], at_point["paper"]) == (0.1, 0.047)
    assert not at_point["is_within_target"]
    assert at_point["in_mixed_batches"] == {"average_relative_loss": 0.2, "degraded_share": 0.95}
    assert figures["training_free"]["best"] == "mean-2"
    assert list(figures["training_free"]["mean_loss"]) == ["mean-2", "nothing"]


def test_rules_are_compared_at_the_same_shares_of_degraded_choices() -> None:
    by_substitution = {
        "united-2": {0.4: point(10, 0.5, 4.1), 0.0: point(9, 0.9, 4.2)},
        "united-2-instances": {0.4: point(9, 0.5, 4.1), 0.0: point(9, 0.9, 4.2)},
    }
    busiest = {
        "decode": {
            "united-2": [Busiest(8, 0.0), Busiest(4, 0.8)],
            "united-2-instances": [Busiest(8, 0.0), Busiest(2, 0.8)],
        }
    }

    told = by_rule_of(results_of(point(10, 0.0, 4.0), by_substitution), busiest)["united-2"]

    assert told["shares"][:2] == [0.1, 0.2]
    assert told["loss"]["instances"][:2] == [0.02, 0.04]
    assert told["busiest"]["decode"]["tokens"][-1] == 4
    assert told["busiest"]["decode"]["instances"][-1] == 2
