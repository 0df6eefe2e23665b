"""A worker's rows go with those of others from the beginning of a step, or not at all in that step."""

from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.steps import RecentRows, Steps
from moesaic.dispatch.two_phase.way import MANY_ROWS


def test_rows_that_have_gone_directly_do_so_to_the_end_of_their_step() -> None:
    steps = Steps()
    steps.begin(1, 10.0)
    assert steps.may_meet(10.0)

    steps.go_directly()

    assert not steps.may_meet(10.1)
    steps.begin(1, 10.2)
    assert steps.may_meet(10.2)


def test_steps_of_few_rows_begin_directly_for_as_long_as_they_are_told() -> None:
    steps = Steps()

    steps.heed(JoinReply("direct", 0.5), now_s=10.0)

    assert steps.may_meet(10.4)  # to the end of the step that has begun
    for rows, now_s, meets in [(1, 10.4, False), (MANY_ROWS, 10.4, True), (1, 10.5, True)]:
        steps.begin(rows, now_s)
        assert steps.may_meet(now_s) is meets


def test_after_a_failure_all_rows_go_directly_at_once() -> None:
    steps = Steps()
    steps.begin(MANY_ROWS, 10.0)

    steps.direct_until_s = 10.5

    assert not steps.may_meet(10.1)
    steps.begin(MANY_ROWS, 10.2)
    assert not steps.may_meet(10.6)
    steps.begin(MANY_ROWS, 10.6)
    assert steps.may_meet(10.6)


def test_who_was_alone_offers_again_at_a_first_layer_when_its_time_is_over() -> None:
    steps = Steps()

    steps.heed(JoinReply("alone", 0.5), now_s=10.0)

    assert steps.is_alone(first=True, now_s=10.4)
    assert steps.is_alone(first=False, now_s=10.6)
    assert not steps.is_alone(first=True, now_s=10.6)
    steps.heed(JoinReply("offer"), now_s=10.6)
    assert not steps.is_alone(first=False, now_s=10.7)


def test_who_begins_no_steps_is_idle() -> None:
    steps = Steps()
    assert steps.is_idle(10.0)

    steps.begin(1, 10.0)

    assert not steps.is_idle(10.5)
    assert steps.is_idle(20.0)


def test_rows_of_steps_that_began_lately_count() -> None:
    recent = RecentRows()
    for worker_id, rows, now_s in [("b", 2, 9.0), ("b", 3, 10.0), ("c", 7, 13.0)]:
        recent.note(worker_id, rows, now_s)

    assert recent.rows(13.0) == 10
    assert recent.rows(15.0) == 7
