import pytest

from moesaic.errors import InvalidInput
from moesaic.simulation.event_loop import EventLoop


def test_actions_go_by_time_and_then_by_the_order_they_were_planned() -> None:
    loop, seen = EventLoop(), list[tuple[float, int]]()

    for time_s, name in ((2.0, 0), (1.0, 1), (2.0, 2), (1.0, 3)):
        loop.at(time_s, lambda argument: seen.append((loop.now_s, argument)), name)
    loop.run()

    assert seen == [(1.0, 1), (1.0, 3), (2.0, 0), (2.0, 2)]
    assert loop.num_actions == 4


def test_a_run_ends_at_its_time_and_goes_on_from_there() -> None:
    loop, seen = EventLoop(), list[float]()

    def again(argument: int) -> None:
        seen.append(loop.now_s)
        loop.after(1.0, again)

    loop.at(0.5, again)
    loop.run(until_s=2.0)

    assert (seen, loop.now_s, loop.next_s) == ([0.5, 1.5], 2.0, 2.5)
    loop.run(until_s=3.0)
    assert seen == [0.5, 1.5, 2.5]


def test_nothing_is_planned_for_times_that_are_over() -> None:
    loop = EventLoop()
    loop.at(1.0, lambda argument: loop.at(0.5, print))

    with pytest.raises(InvalidInput, match="time_s"):
        loop.run()


def test_progress_is_told_at_the_end_at_least() -> None:
    loop, told = EventLoop(), list[float]()
    loop.at(1.0, lambda argument: None)

    loop.run(progress=told.append)

    assert told == [1.0]
