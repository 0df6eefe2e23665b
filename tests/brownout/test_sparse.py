"""Decisions worth telling are few, and come again with their results."""

from dataclasses import replace

import pytest

from moesaic.brownout.control.contract import Thresholds
from moesaic.brownout.control.ladder import Ladder, SparseDecisions
from moesaic.messages.brownout import BrownoutPolicy

POLICY = BrownoutPolicy(mode="auto", window_s=5.0)


def at(ladder: Ladder, prefill: float, decode: float = 1.0, *, shedding: bool = False) -> Ladder:
    ladder.state = replace(
        ladder.state, thresholds=Thresholds(prefill, decode), shedding=shedding, ttft_s=0.2
    )
    return ladder


def test_small_changes_are_told_once_they_have_added_up() -> None:
    sparse, ladder = SparseDecisions(), Ladder(POLICY)
    told = [sparse.note(float(i), 0.0, at(ladder, 1 - 0.04 * i)) for i in range(7)]

    assert told == [False, False, False, True, False, False, True]
    first, second = sparse.take()
    assert (first.prefill_before, first.prefill) == (1.0, 0.88)
    assert (second.prefill_before, second.prefill) == (0.88, 0.76)
    assert sparse.take() == []


def test_there_is_one_a_second_at_most_and_none_is_lost_for_good() -> None:
    sparse, ladder = SparseDecisions(), Ladder(POLICY)

    assert sparse.note(0.0, 0.0, at(ladder, 0.5))
    assert not sparse.note(0.5, 0.0, at(ladder, 0.0))
    assert sparse.note(1.0, 0.0, at(ladder, 0.0))
    assert [d.number for d in sparse.take()] == [1, 2]


def test_the_return_to_exact_and_the_ends_of_shedding_are_always_told() -> None:
    sparse, ladder = SparseDecisions(), Ladder(POLICY)

    assert sparse.note(0.0, 0.0, at(ladder, 0.9, shedding=True))
    assert sparse.note(1.0, 0.0, at(ladder, 0.95))
    assert sparse.note(2.0, 0.0, at(ladder, 1.0))
    assert not sparse.note(3.0, 0.0, at(ladder, 1.0))


def test_shedding_that_was_over_before_it_could_be_told_is_told() -> None:
    sparse, ladder = SparseDecisions(), Ladder(POLICY)
    sparse.note(0.0, 0.0, at(ladder, 0.5))

    assert not sparse.note(0.5, 0.0, at(ladder, 0.5), refused=3)
    assert sparse.note(1.0, 0.0, at(ladder, 0.5), refused=3)
    assert not sparse.note(2.0, 0.0, at(ladder, 0.5), refused=3)
    assert [(d.refused, d.reason) for d in sparse.take()] == [
        (0, "a target would be missed"),
        (3, "the queue is short again"),
    ]


@pytest.mark.parametrize("late_s", [0.0, 3.0])
def test_a_decision_is_told_again_with_what_was_measured_in_the_window_after_it(
    late_s: float,
) -> None:
    sparse, ladder = SparseDecisions(), at(Ladder(POLICY), 0.5)
    ladder.note_latency("prefill", 9.0, 7.0, exact=False)
    sparse.note(10.0, 123.0, ladder)
    for seconds in (0.1, 0.3):
        ladder.note_latency("prefill", 12.0, seconds, exact=False)
    sparse.note(14.9, 0.0, ladder)
    [made] = sparse.take()

    ladder.windows["prefill"].p90_s(15.0 + late_s)
    sparse.note(15.0 + late_s, 0.0, ladder)

    [again] = sparse.take()
    assert (made.inputs.ttft_p90_s, made.predicted_ttft_s, made.at) == (7.0, 0.2, 123.0)
    assert (again.decision_id, again.at) == (made.decision_id, 123.0)
    assert (again.measured_ttft_s, again.measured_tpot_s) == (0.3, None)
    assert made.measured_ttft_s is None
