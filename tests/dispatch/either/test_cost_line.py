"""Few rows are routed and many are gathered, wherever the two lines cross."""

from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.either.cost_line import WayChooser

SECONDS = {
    "route": lambda rows: 0.001 + 0.0001 * rows,
    "gather": lambda rows: 0.02 + 0.00002 * rows,
}


def taught(sizes: list[int]) -> WayChooser:
    chooser = WayChooser()
    for rows in sizes:
        for way, seconds in SECONDS.items():
            chooser.learn(way, rows, seconds(rows))  # type: ignore[arg-type]
    return chooser


@given(st.integers(1, 4096))
def test_the_faster_way_is_chosen_once_both_are_known(rows: int) -> None:
    choice = taught([1, 64, 2048]).choose(rows)

    faster = min(SECONDS, key=lambda way: SECONDS[way](rows))
    difference = abs(SECONDS["route"](rows) - SECONDS["gather"](rows))
    assert choice.way == faster or difference < 1e-6
    assert not choice.exploring


def test_each_way_is_tried_before_it_is_judged() -> None:
    chooser = WayChooser()
    first = chooser.choose(8)
    chooser.learn(first.way, 8, 0.1)

    second = chooser.choose(8)

    assert {first.way, second.way} == {"route", "gather"}
    assert first.exploring
    assert second.exploring


def test_a_way_that_was_slower_is_looked_at_again() -> None:
    chooser = taught([1, 64, 2048])
    ways = []
    for _ in range(600):
        choice = chooser.choose(1)
        ways.append(choice.way)
        chooser.learn(choice.way, 1, SECONDS[choice.way](1))

    assert 1 <= ways.count("gather") <= 3


def test_what_cannot_be_gone_is_not_chosen() -> None:
    choice = taught([1, 64]).choose(1, ("gather",))

    assert choice.way == "gather"
    assert not choice.exploring
