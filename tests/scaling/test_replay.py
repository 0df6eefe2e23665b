"""Replays against every step by itself, and where a formula is known."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import InvalidInput
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives, RecentDemand, ServingLimits
from moesaic.scaling.replay import forecast, meets
from tests.scaling.fleets import EvenTimes, demand_of, steady_demand
from tests.scaling.token_by_token import expected_latencies

TIMES, LIMITS, EASY = EvenTimes(), ServingLimits(), Objectives(1e3, 1e3)
WINDOW_S = 16.0

requests = st.lists(
    st.tuples(
        st.integers(0, 16 * 64).map(lambda n: n / 64),
        st.integers(1, 300),
        st.integers(1, 60),
    ),
    max_size=25,
)
tight_limits = st.builds(
    ServingLimits,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 128),
    kv_tokens=st.integers(100, 1000),
    step_target_s=st.sampled_from([0.0, 2.0**-5, 2.0**-4]),
)
objectives = st.builds(
    Objectives,
    ttft_s=st.sampled_from([0.125, 0.5, 2.0]),
    tpot_s=st.sampled_from([0.015625, 0.03125, 0.125]),
    attainment=st.sampled_from([0.5, 0.9, 1.0]),
)


def percentile_90(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else 0.0


@given(requests, st.integers(1, 3), tight_limits, objectives, st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=300)
def test_a_replay_is_what_all_steps_one_by_one_are(
    rows: list[tuple[float, int, int]],
    num_attention: int,
    limits: ServingLimits,
    targets: Objectives,
    headroom: float,
) -> None:
    demand, shape = demand_of(rows, WINDOW_S), FleetShape(num_attention, 2)

    found = forecast(demand, shape, TIMES, limits, targets, headroom)

    attainment, ttft_s, tpot_s = expected_latencies(demand, shape, TIMES, limits, targets, headroom)
    assert found.attainment == pytest.approx(attainment)
    assert found.ttft_p90_s == pytest.approx(percentile_90(ttft_s))
    assert found.tpot_p90_s == pytest.approx(percentile_90(tpot_s))


@given(requests, st.integers(1, 3), tight_limits, objectives)
@settings(max_examples=200)
def test_the_quick_answer_is_that_of_the_whole_replay(
    rows: list[tuple[float, int, int]],
    num_attention: int,
    limits: ServingLimits,
    targets: Objectives,
) -> None:
    demand, shape = demand_of(rows * 3, WINDOW_S), FleetShape(num_attention, 2)

    found = meets(demand, shape, TIMES, limits, targets)

    whole = forecast(demand, shape, TIMES, limits, targets)
    assert found == (whole.attainment >= targets.attainment)


def test_a_lone_request_has_its_first_token_after_one_step() -> None:
    found = forecast(demand_of([(1.0, 100, 5)]), FleetShape(1, 1), TIMES, LIMITS, EASY)

    step_s = TIMES.step_s + 100 * TIMES.row_s + 100 * 101 / 2 * TIMES.prompt_key_s
    assert found.ttft_p90_s == pytest.approx(step_s)
    keys = (101 + 102 + 103 + 104) / 4
    assert found.tpot_p90_s == pytest.approx(TIMES.step_s + TIMES.row_s + keys * TIMES.key_s)
    assert found.attainment == 1.0


def test_a_request_that_is_only_scored_has_no_later_tokens() -> None:
    found = forecast(
        demand_of([(1.0, 100, 1)]), FleetShape(1, 1), TIMES, LIMITS, Objectives(1e3, 0.0)
    )

    assert (found.attainment, found.tpot_p90_s) == (1.0, 0.0)


def test_a_long_prompt_takes_as_many_steps_as_limits_make_of_it() -> None:
    times = EvenTimes(row_s=0.0, key_s=0.0)
    limits = ServingLimits(max_num_batched_tokens=64)

    found = forecast(demand_of([(1.0, 300, 1)]), FleetShape(1, 1), times, limits, EASY)

    assert found.ttft_p90_s == 5 * times.step_s


def test_steps_have_no_more_rows_of_prompts_than_they_have_time_for() -> None:
    times = EvenTimes(row_s=2.0**-10, key_s=0.0)
    limits = ServingLimits(step_target_s=0.25)  # rows have 15/64 s: 240 of them

    found = forecast(demand_of([(1.0, 600, 2)]), FleetShape(1, 1), times, limits, EASY)

    assert found.ttft_p90_s == pytest.approx(3 * times.step_s + 600 * times.row_s)


def test_without_requests_all_targets_are_met_and_nobody_is_busy() -> None:
    found = forecast(demand_of([]), FleetShape(1, 1), TIMES, LIMITS, Objectives(0.0, 0.0))

    assert (found.attainment, found.attention_busy, found.experts_busy) == (1.0, 0.0, 0.0)


def test_an_overloaded_fleet_is_always_busy_and_its_queue_is_late() -> None:
    # Each request needs a second on one worker; two a second come.
    times, limits = EvenTimes(step_s=1.0, row_s=0.0, key_s=0.0), ServingLimits(max_num_seqs=1)
    demand = steady_demand(2.0, prompt=10, answer=1)
    short = Objectives(5.0, 1.0)

    one = forecast(demand, FleetShape(1, 1), times, limits, short)
    three = forecast(demand, FleetShape(3, 1), times, limits, short)

    assert one.attention_busy > 0.99
    assert one.attainment < 0.1
    # Half of the requests have no first token when it is over: the longest waits are of those.
    assert one.ttft_p90_s > 40.0
    assert three.attention_busy == pytest.approx(2 / 3, abs=0.02)
    assert three.attainment == 1.0


def test_load_of_both_sides_is_the_time_in_which_they_compute() -> None:
    times = EvenTimes(step_s=0.25, row_s=0.0, key_s=0.0, experts_s=2.0**-6)
    demand = steady_demand(1.0, prompt=16, answer=1)  # 16 rows: 1/4 s of one expert worker

    found = forecast(demand, FleetShape(2, 2), times, LIMITS, EASY)

    assert found.attention_busy == pytest.approx(0.25 / 2, rel=0.02)
    assert found.experts_busy == pytest.approx(0.25 / 2, rel=0.02)


def test_long_answers_of_earlier_requests_keep_the_fleet_busy_from_the_beginning() -> None:
    # Answers last for about a minute, so the first of an idle fleet would be faster than they are.
    times = EvenTimes(step_s=2.0**-4, row_s=2.0**-8, key_s=0.0)
    demand = steady_demand(0.25, prompt=1, answer=512)
    targets = Objectives(1.0, 0.125)

    found = forecast(demand, FleetShape(1, 1), times, LIMITS, targets)

    # Little: as many are under way as come while one lives, and steps take so much longer.
    under_way = 0.25 * 511 * times.step_s / (1 - 0.25 * 511 * times.row_s)
    tpot_s = times.step_s + under_way * times.row_s
    assert found.tpot_p90_s == pytest.approx(tpot_s, rel=0.1)


def test_denser_arrivals_are_later() -> None:
    times, limits = EvenTimes(step_s=0.5, row_s=0.0, key_s=0.0), ServingLimits(max_num_seqs=1)
    demand, targets = steady_demand(1.8, answer=1), Objectives(2.0, 1.0)

    found = [
        forecast(demand, FleetShape(1, 1), times, limits, targets, headroom).attainment
        for headroom in (1.0, 1.2, 1.5)
    ]

    assert found[0] == 1.0
    assert found[0] > found[1] > found[2]


@pytest.mark.parametrize(
    ("shape", "headroom", "field"), [((0, 1), 1.0, "shape"), ((1, 1), 0.0, "headroom")]
)
def test_what_cannot_be_replayed_is_refused(
    shape: tuple[int, int], headroom: float, field: str
) -> None:
    demand: RecentDemand = steady_demand(1.0)

    with pytest.raises(InvalidInput) as caught:
        forecast(demand, FleetShape(*shape), TIMES, LIMITS, EASY, headroom)

    assert caught.value.field == field
