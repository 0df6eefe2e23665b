import pytest

from moesaic.cli.suite.restart import Again, GiveUp, RestartPolicy


def test_delays_double_up_to_half_a_minute() -> None:
    policy = RestartPolicy()

    delays = [policy.exited(1, ran_s=40) for _ in range(7)]

    assert delays == [Again(d) for d in (1, 2, 4, 8, 16, 30, 30)]


def test_a_minute_of_health_makes_the_delay_short_again() -> None:
    policy = RestartPolicy()
    for _ in range(4):
        policy.exited(1, ran_s=40)

    assert policy.exited(-9, ran_s=61) == Again(1)


def test_a_service_that_never_starts_is_given_up_after_three_tries() -> None:
    policy = RestartPolicy()

    verdicts = [policy.exited(1, ran_s=0.1) for _ in range(3)]

    assert verdicts[:2] == [Again(1), Again(2)]
    assert verdicts[2] == GiveUp("it failed to start 3 times")


def test_a_service_that_has_run_before_is_never_given_up() -> None:
    policy = RestartPolicy()
    policy.exited(-9, ran_s=31)

    assert all(isinstance(policy.exited(1, ran_s=0.1), Again) for _ in range(20))


def test_a_service_that_is_killed_again_and_again_is_never_given_up() -> None:
    policy = RestartPolicy()

    assert all(isinstance(policy.exited(-9, ran_s=0.1), Again) for _ in range(20))


def test_settings_and_files_that_have_worked_are_tried_again() -> None:
    policy = RestartPolicy()
    policy.exited(-9, ran_s=31, worked=True)

    assert isinstance(policy.exited(2, ran_s=3, worked=True), Again)


def test_what_no_restart_can_help_is_not_tried_again_just_after_a_suite_was_ready() -> None:
    assert RestartPolicy().exited(2, ran_s=9, worked=True) == GiveUp("no restart can help")


@pytest.mark.parametrize("ran_s", [0.3, 29, 31, 7200])
def test_what_no_restart_can_help_is_not_tried_again_however_long_it_took(ran_s: float) -> None:
    assert RestartPolicy().exited(2, ran_s) == GiveUp("no restart can help")
