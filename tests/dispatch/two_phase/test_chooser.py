"""The way with the least prediction wins, unless one is told."""

import pytest

from moesaic.dispatch.two_phase.choice.chooser import RoundChoice, RoundChooser
from moesaic.dispatch.two_phase.choice.costs import (
    WAYS,
    LinkCost,
    LinkCosts,
    LinkSurvey,
    RoundShape,
    Way,
    predict,
)

FAST, SLOW = LinkCost(1e-6, 1e-6, 1e11), LinkCost(1e-3, 1e-4, 1e8)
SHAPE = RoundShape(4, (4, 4), 0, 1 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("costs", "way"), [(LinkCosts(FAST, SLOW), "relay"), (LinkCosts(SLOW, FAST), "direct")]
)
def test_the_least_prediction_wins(costs: LinkCosts, way: Way) -> None:
    chooser = RoundChooser("auto")
    chooser.costs = costs

    choice = chooser.choose(SHAPE)

    assert choice.way == way
    assert choice.predicted_s == predict(SHAPE, costs)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_is_told_is_gone(way: Way) -> None:
    chooser = RoundChooser(way)

    assert chooser.is_ready
    assert chooser.choose(SHAPE) == RoundChoice(way, "told")


def test_before_links_are_measured_nothing_is_chosen_for_own_rows_and_relay_for_others() -> None:
    chooser = RoundChooser("auto")

    assert not chooser.is_ready
    assert chooser.choose(SHAPE).way == "relay"


def test_other_nodes_that_send_as_much_count() -> None:
    """What every node sends everywhere fills the links of expert nodes."""
    chooser = RoundChooser("auto")
    chooser.costs = LinkCosts(LinkCost(5e-4, 0.0, 1e12), LinkCost(0.0, 0.0, 1e6))
    shape = RoundShape(2, (2, 2), 0, 200, 200)
    alone = chooser.choose(shape)

    chooser.senders = 8
    crowded = chooser.choose(shape)

    for way in WAYS:
        assert crowded.predicted_s[way] > alone.predicted_s[way]
    assert (alone.way, crowded.way) == ("direct", "relay")


@pytest.mark.parametrize(("inter", "why"), [(FAST, "faster"), (SLOW, "forced")])
def test_rows_that_go_directly_by_choice_are_told_from_others(inter: LinkCost, why: str) -> None:
    chooser = RoundChooser("auto")
    chooser.costs = LinkCosts(SLOW if inter is FAST else FAST, inter)

    assert chooser.directly(SHAPE).why == why


def test_the_best_of_several_measurements_counts_and_the_slowest_of_several_links() -> None:
    near, far = [LinkCost(1, 5, 10), LinkCost(2, 4, 20)], [LinkCost(3, 1, 90), LinkCost(4, 1, 80)]
    surveys = [LinkSurvey([a, b], [FAST]) for a, b in zip(near, far, strict=True)]

    assert LinkCosts.of(surveys).intra == LinkCost(3, 4, 20)


def test_noise_that_parts_a_message_in_two_ways_makes_no_link_free() -> None:
    found = [LinkCost(0.0, 3e-5, 1e9), LinkCost(3e-5, 0.0, 1e9), LinkCost(1e-5, 2e-5, 1e9)]

    best = LinkCosts.of([LinkSurvey([cost], [cost]) for cost in found]).inter

    assert best.latency_s + best.message_s == pytest.approx(3e-5)
