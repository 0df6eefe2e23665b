"""The choice follows predictions at first, and what exchanges really take in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.exchange.choice import ExchangeChooser
from moesaic.dispatch.exchange.costs import CASES, Case

seconds = st.fixed_dictionaries({case: st.floats(1e-5, 1.0) for case in CASES})


@given(seconds)
def test_before_anything_is_known_the_least_prediction_wins(model_s: dict[Case, float]) -> None:
    choice = ExchangeChooser().choose("kind", model_s)

    assert not choice.exploring
    assert choice.predicted_s == pytest.approx(model_s)
    assert model_s[choice.case] == min(model_s.values())


@given(seconds, st.floats(0, 1.0))
def test_a_rest_that_all_ways_have_changes_no_choice(
    model_s: dict[Case, float], rest_s: float
) -> None:
    chooser = ExchangeChooser()
    best = chooser.choose("kind", model_s).case
    chooser.learn("kind", best, model_s[best], model_s[best] + rest_s)

    choice = chooser.choose("kind", model_s)

    assert choice.predicted_s[choice.case] == pytest.approx(min(choice.predicted_s.values()))
    assert choice.predicted_s[best] == pytest.approx(model_s[best] + rest_s)


def steps(chooser: ExchangeChooser, model_s: dict[Case, float], truth: dict[Case, float]) -> Case:
    """Go 1000 times; the way that was gone most at the end."""
    gone: list[Case] = []
    for _ in range(1000):
        choice = chooser.choose("kind", model_s)
        chooser.learn("kind", choice.case, model_s[choice.case], truth[choice.case])
        gone.append(choice.case)
    return max(CASES, key=gone[-200:].count)


@pytest.mark.parametrize("fastest", CASES)
def test_a_model_that_is_clearly_wrong_is_corrected(fastest: Case) -> None:
    model_s: dict[Case, float] = {"direct": 1.0e-3, "case-1": 1.1e-3, "case-2": 1.2e-3}
    truth: dict[Case, float] = dict.fromkeys(CASES, 2e-3)
    truth[fastest] = 1.3e-3

    assert steps(ExchangeChooser(), model_s, truth) == fastest


def test_a_small_difference_is_left_to_what_links_cost() -> None:
    model_s: dict[Case, float] = {"direct": 1.1e-3, "case-1": 1.2e-3, "case-2": 1.0e-3}
    truth: dict[Case, float] = {"direct": 1.8e-3, "case-1": 1.9e-3, "case-2": 2.0e-3}

    assert steps(ExchangeChooser(), model_s, truth) == "case-2"


def test_a_way_that_should_take_far_longer_is_never_tried() -> None:
    model_s: dict[Case, float] = {"direct": 1e-3, "case-1": 1.0, "case-2": 1e-3}
    chooser = ExchangeChooser()

    gone = set()
    for _ in range(1000):
        case = chooser.choose("kind", model_s).case
        chooser.learn("kind", case, model_s[case], 2e-3)
        gone.add(case)

    assert gone == {"direct", "case-2"}


def test_kinds_are_learned_apart() -> None:
    model_s: dict[Case, float] = {"direct": 1e-3, "case-1": 2e-3, "case-2": 3e-3}
    chooser = ExchangeChooser()
    chooser.learn("few rows", "direct", 1e-3, 9e-3)
    chooser.learn("few rows", "case-2", 3e-3, 3e-3)

    assert chooser.choose("few rows", model_s).case == "case-2"
    assert chooser.choose("many rows", model_s).case == "direct"
