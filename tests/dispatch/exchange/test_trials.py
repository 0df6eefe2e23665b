"""One expert worker conducts: trials that all have heard of, and one that measures at a time."""

from moesaic.dispatch.exchange.costs import CASES
from moesaic.dispatch.exchange.trials import ATTEND_EVERY_S, SLOT_S, Beat, Conductor, Trial


def test_every_way_has_its_slots_there_and_back_again() -> None:
    trial = Trial(start_s=10.0, slot_s=1.0, sweeps=4)

    slots = [trial.slot(10.5 + n) for n in range(12)]

    assert [slot.case for slot in slots if slot] == [*CASES, *CASES[::-1]] * 2
    assert [slot.sweep[1] for slot in slots if slot] == [n // 3 for n in range(12)]
    assert [slot.ends_s for slot in slots if slot] == [11.0 + n for n in range(12)]


def test_there_is_no_slot_before_and_after_a_trial() -> None:
    trial = Trial(start_s=10.0, slot_s=1.0, sweeps=4)

    assert trial.slot(9.999) is None
    assert trial.slot(10.0) is not None
    assert trial.slot(21.999) is not None
    assert trial.slot(22.0) is None


def test_the_beginning_of_a_slot_shows_nothing_yet() -> None:
    trial = Trial(start_s=0.0, slot_s=1.0)

    settled = [slot.settled for n in range(10) if (slot := trial.slot(3 + n / 10))]

    assert settled[0] is False
    assert settled[-1] is True
    assert settled == sorted(settled)


def test_all_who_ask_now_and_then_know_a_trial_before_it_starts() -> None:
    conductor = Conductor()
    planned = conductor.beat("a-0", "a", 100.0, slot_s=0.5)
    assert planned.trial is not None

    heard = [
        conductor.beat("b-0", "b", 100.0 + ATTEND_EVERY_S * share) for share in (0.1, 0.5, 1.0)
    ]

    assert all(beat.trial == planned.trial for beat in heard)
    assert planned.trial.start_s > 100.0 + 2 * ATTEND_EVERY_S


def test_a_longer_slot_is_granted_while_all_can_still_hear_of_it() -> None:
    conductor = Conductor()
    short = conductor.beat("a-0", "a", 0.0, slot_s=0.5).trial
    longer = conductor.beat("b-0", "b", 0.1, slot_s=0.8).trial
    assert short is not None
    assert longer == Trial(short.start_s, 0.8)

    too_late = conductor.beat("a-0", "a", longer.start_s - ATTEND_EVERY_S, slot_s=3.0).trial

    assert too_late == longer


def test_slots_are_neither_endless_nor_empty() -> None:
    for wished_s, granted_s in ((1e-9, SLOT_S[0]), (1e9, SLOT_S[1])):
        trial = Conductor().beat("a-0", "a", 0.0, slot_s=wished_s).trial
        assert trial is not None
        assert trial.slot_s == granted_s


def test_a_trial_follows_another_only_when_that_is_over() -> None:
    conductor = Conductor()
    first = conductor.beat("a-0", "a", 0.0, slot_s=1.0).trial
    assert first is not None

    during = conductor.beat("b-0", "b", first.end_s - 0.1, slot_s=1.0).trial
    after = conductor.beat("b-0", "b", first.end_s, slot_s=1.0).trial

    assert during == first
    assert after is not None
    assert after.start_s > first.end_s


def measures(conductor: Conductor, worker: str, now_s: float) -> bool:
    return conductor.beat(worker, "a", now_s, measures=True).may_measure


def test_one_worker_measures_at_a_time() -> None:
    conductor = Conductor()

    assert measures(conductor, "a-0", 0.0)
    assert not measures(conductor, "a-1", 0.1)
    conductor.beat("a-1", "a", 0.2)  # who does not measure ends nobody else's turn
    assert not measures(conductor, "a-2", 0.3)
    conductor.beat("a-0", "a", 0.4)  # done
    assert measures(conductor, "a-1", 0.5)


def test_the_turn_of_one_that_died_ends_by_itself() -> None:
    conductor = Conductor()
    assert measures(conductor, "a-0", 0.0)

    assert measures(conductor, "a-1", 60.0)


def test_nobody_measures_during_a_trial_and_no_trial_is_planned_while_one_measures() -> None:
    conductor = Conductor()
    assert measures(conductor, "a-0", 0.0)
    assert conductor.beat("a-1", "a", 0.1, slot_s=1.0).trial is None
    conductor.beat("a-0", "a", 0.2)

    trial = conductor.beat("a-1", "a", 0.3, slot_s=1.0).trial

    assert trial is not None
    assert not measures(conductor, "a-2", 0.4)
    assert measures(conductor, "a-2", trial.end_s)


def test_nodes_that_ask_no_more_are_forgotten() -> None:
    conductor = Conductor()
    conductor.beat("a-0", "a", 0.0)
    assert conductor.beat("b-0", "b", 1.0).nodes == 2

    assert conductor.beat("a-0", "a", 60.0) == Beat(60.0, None, may_measure=False, nodes=1)
