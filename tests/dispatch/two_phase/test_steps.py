"""A worker's rows go with those of others from the beginning of a step, or not at all in that step."""

from moesaic.dispatch.two_phase.messages import JoinReply
from moesaic.dispatch.two_phase.steps import Steps


def test_batches_of_a_step_are_counted_layer_by_layer() -> None:
    steps = Steps()

    assert [steps.lane(b"one", 0), steps.lane(b"one", 0), steps.lane(b"one", 1)] == [0, 1, 0]
    assert [steps.lane(b"two", 1), steps.lane(b"two", 1)] == [0, 1]
    assert [steps.lane(b"", 0), steps.lane(b"", 0)] == [0, 0]


def test_a_batch_that_has_gone_directly_does_so_to_the_end_of_its_step() -> None:
    steps = Steps()
    steps.begin(0, 10.0)
    assert steps.may_meet(0, 10.0)

    steps.go_directly(0)

    assert not steps.may_meet(0, 10.1)
    assert steps.may_meet(1, 10.1)
    steps.begin(0, 10.2)
    assert steps.may_meet(0, 10.2)


def test_who_is_told_to_go_directly_does_for_so_long() -> None:
    steps = Steps()

    steps.heed(JoinReply("direct", 0.5), lane=0, now_s=10.0)

    assert not steps.may_meet(0, 10.4)
    assert not steps.may_meet(1, 10.4)
    assert steps.may_meet(0, 10.5)


def test_who_was_alone_offers_again_at_a_first_layer_when_its_time_is_over() -> None:
    steps = Steps()

    steps.heed(JoinReply("alone", 0.5), lane=0, now_s=10.0)

    assert steps.is_alone(0, first=True, now_s=10.4)
    assert steps.is_alone(0, first=False, now_s=10.6)
    assert not steps.is_alone(0, first=True, now_s=10.6)
    assert not steps.is_alone(1, first=False, now_s=10.4)
    steps.heed(JoinReply("offer"), lane=0, now_s=10.6)
    assert not steps.is_alone(0, first=False, now_s=10.7)


def test_to_be_alone_by_chance_is_no_reason_to_choose_a_way() -> None:
    steps = Steps()
    assert not steps.has_missed(0, 10.0)

    steps.heed(JoinReply("alone", 0.0), lane=0, now_s=10.0)
    steps.heed(JoinReply("alone", 0.5), lane=1, now_s=10.0)

    assert steps.has_missed(0, 10.0)
    assert not steps.has_missed(1, 10.0)


def test_who_begins_no_steps_is_idle() -> None:
    steps = Steps()
    assert steps.is_idle(10.0)

    steps.begin(0, 10.0)

    assert not steps.is_idle(10.5)
    assert steps.is_idle(20.0)
