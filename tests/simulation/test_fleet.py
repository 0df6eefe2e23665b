import numpy as np
import pytest

from moesaic.errors import InvalidInput
from moesaic.scaling.contract import Objectives, ServingLimits
from moesaic.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic.simulation.fleet import PathDelays
from tests.simulation.fleets import MODEL, drawn_trace, fleet_of, model_of

TIGHT = ServingLimits(max_num_seqs=6, max_num_batched_tokens=48, kv_tokens=1200)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limits", [ServingLimits(), TIGHT])
def test_every_request_ends_once_with_all_its_tokens(seed: int, limits: ServingLimits) -> None:
    trace = drawn_trace(seed=seed)
    fleet = fleet_of(trace, 3, limits)

    fleet.loop.run()

    figures = fleet.figures()
    assert figures.requests == figures.ended == len(trace)
    assert sum(w.num_tokens for w in fleet.workers) == trace.answer_tokens.sum()
    assert fleet.num_open == 0


def test_nothing_happens_before_its_cause() -> None:
    trace = drawn_trace()
    fleet = fleet_of(trace, 2, TIGHT)

    fleet.loop.run()

    records = fleet.records
    computed = trace.prompt_tokens - trace.cached_tokens
    assert (records.ttft_s >= 0.01 + 1e-4 * computed - 1e-9).all()
    later = trace.answer_tokens - 1
    assert (records.ended_s - records.began_s >= later * 0.0105 - 1e-9).all()


def test_the_same_seed_gives_the_same_times_and_another_one_does_not() -> None:
    trace = drawn_trace()
    fleets = [fleet_of(trace, 2, spread=0.2, seed=seed) for seed in (1, 1, 2)]

    for fleet in fleets:
        fleet.loop.run()

    first, again, other = (fleet.records.ended_s for fleet in fleets)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limits", [ServingLimits(), TIGHT])
@pytest.mark.parametrize("key_s", [0.0, 1e-6])
def test_runs_of_steps_take_the_times_of_single_steps(
    seed: int, limits: ServingLimits, key_s: float
) -> None:
    trace = drawn_trace(seed=seed)
    model = model_of(0.01, 1e-4, 5e-4, key_s)
    runs, steps = (fleet_of(trace, 2, limits, model=model, one_by_one=o) for o in (False, True))

    runs.loop.run()
    steps.loop.run()

    assert runs.records.began_s == pytest.approx(steps.records.began_s, abs=1e-9)
    assert runs.records.ended_s == pytest.approx(steps.records.ended_s, abs=1e-9)
    assert runs.records.worker.tolist() == steps.records.worker.tolist()
    assert runs.figures().events == steps.figures().events
    assert runs.loop.num_actions < steps.loop.num_actions


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_waits_of_one_at_a_time_are_those_of_the_closed_form(load: float) -> None:
    service_s, number = 0.1, 60_000
    ones = ArrivalTrace.of(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    trace = RateCurve.constant(load / service_s, number * service_s / load).arrivals(ones, seed=3)
    fleet = fleet_of(
        trace, limits=ServingLimits(max_num_seqs=1), model=model_of(service_s, 0, 0, 0)
    )

    fleet.loop.run()

    wait_s = fleet.records.ttft_s.mean() - service_s
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)  # M/D/1
    assert fleet.figures().attention_busy == pytest.approx(load, rel=0.03)


def test_requests_in_the_fleet_are_as_many_as_come_while_one_is_there() -> None:
    trace = drawn_trace(per_s=10.0, span_s=2000.0)
    fleet, seen = fleet_of(trace, 2), list[int]()
    for tenth in range(20_000):
        fleet.loop.at(tenth / 10, lambda _: seen.append(fleet.num_open))

    fleet.loop.run()

    there_s = (fleet.records.ended_s - trace.at_s).mean()
    assert np.mean(seen) == pytest.approx(trace.requests_per_s * there_s, rel=0.02)  # Little's law


def test_delays_on_the_way_add_to_first_tokens_alone() -> None:
    trace = drawn_trace(per_s=0.1, span_s=500.0)  # nobody waits for another
    near, far = fleet_of(trace), fleet_of(trace, delays=PathDelays(0.2, 0.03))

    near.loop.run()
    far.loop.run()

    assert far.records.ttft_s == pytest.approx(near.records.ttft_s + 0.23)
    known = trace.answer_tokens > 1
    assert far.records.tpot_s[known] == pytest.approx(near.records.tpot_s[known])


def test_noise_keeps_the_mean() -> None:
    trace = drawn_trace(per_s=2.0, span_s=2000.0)
    exact, noisy = fleet_of(trace), fleet_of(trace, spread=0.3)

    exact.loop.run()
    noisy.loop.run()

    assert noisy.figures().tpot.mean_s == pytest.approx(exact.figures().tpot.mean_s, rel=0.03)


def test_new_workers_take_requests_after_their_delay() -> None:
    trace = drawn_trace(per_s=20.0)
    fleet = fleet_of(trace)
    fleet.loop.at(10.0, lambda _: fleet.resize(3, delay_s=20.0))

    fleet.loop.run(until_s=29.9)
    before = fleet.num_active
    fleet.loop.run()

    assert (before, fleet.num_active, fleet.clock.shape.attention) == (1, 3, 3)
    assert set(fleet.records.worker[trace.at_s < 30].tolist()) == {0}
    assert set(fleet.records.worker[trace.at_s > 31].tolist()) == {0, 1, 2}
    assert fleet.worker_s == pytest.approx(3 * fleet.loop.now_s - 60.0)


def test_workers_that_leave_end_what_they_have() -> None:
    trace = drawn_trace(per_s=20.0)
    fleet = fleet_of(trace, 3)
    fleet.loop.at(30.0, lambda _: fleet.resize(1))

    fleet.loop.run(until_s=30.0)
    left_open = sum(w.planner.num_open for w in fleet.workers[1:])
    fleet.loop.run()

    assert left_open > 0
    assert fleet.figures().ended == len(trace)
    assert set(fleet.records.worker[trace.at_s > 30].tolist()) == {0}
    assert all(30.0 < w.left_s < fleet.loop.now_s for w in fleet.workers[1:])


def test_workers_that_are_not_needed_any_more_do_not_come() -> None:
    fleet = fleet_of(drawn_trace())
    fleet.loop.at(1.0, lambda _: fleet.resize(4, delay_s=10.0))
    fleet.loop.at(5.0, lambda _: fleet.resize(2))

    fleet.loop.run()

    assert fleet.num_active == len(fleet.workers) == 2


def test_requests_that_can_never_run_are_refused() -> None:
    trace = ArrivalTrace.of(np.zeros(2), np.array([50, 5000]), np.array([5, 5]))
    fleet = fleet_of(trace, limits=TIGHT)

    fleet.loop.run()

    figures = fleet.figures()
    assert (figures.ended, figures.refused) == (1, 1)
    assert fleet.records.attainment(Objectives(1.0, 1.0)) == 0.5


def test_a_fleet_keeps_one_worker() -> None:
    with pytest.raises(InvalidInput, match="attention"):
        fleet_of(drawn_trace()).resize(0)


def test_attainment_counts_requests_that_met_both_targets() -> None:
    fleet = fleet_of(drawn_trace(per_s=12.0), model=MODEL)

    fleet.loop.run()

    records = fleet.records
    assert records.attainment(Objectives(1e9, 1e9)) == 1.0
    assert records.attainment(Objectives(1e-9, 1e9)) == 0.0
    late = np.nan_to_num(records.tpot_s) > 0.0125
    assert records.attainment(Objectives(1e9, 0.0125)) == pytest.approx(1 - late.mean())
