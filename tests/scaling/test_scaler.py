"""Decisions: workers come where targets are missed or will be, and go where fewer do as well."""

from dataclasses import replace

import numpy as np
import pytest

from moesaic.messages.scaling import FleetShape, ScalingAction, ScalingPolicy
from moesaic.scaling import Scaler, forecast, grows
from moesaic.scaling.contract import Objectives, ScalingChoice, ServingLimits
from tests.scaling.fleets import EvenTimes, bounds_of, demand_of, state_of, steady_demand

POLICY = ScalingPolicy(mode="auto")
BOUNDS = bounds_of((1, 1), (8, 8))
TARGETS = Objectives(ttft_s=0.5, tpot_s=0.05)
# A row takes half a millisecond of an attention worker, and two of an expert worker that is alone.
TIMES = EvenTimes(step_s=2.0**-10, row_s=2.0**-11, key_s=0.0, experts_s=2.0**-9)
LIMITS = ServingLimits(max_num_seqs=32, max_num_batched_tokens=128)
SCALER = Scaler(TIMES, LIMITS)
BLIND = Scaler(None, LIMITS)
NOTHING = demand_of([], 120.0)


def attained(shape: FleetShape, per_s: float, headroom: float = 1.0) -> float:
    demand = steady_demand(per_s)
    return forecast(demand, shape, TIMES, LIMITS, TARGETS, headroom).attainment


def action_of(shape: FleetShape, at: float, up: bool | None) -> ScalingAction:
    return ScalingAction(number=1, shape=shape, at=at, up=up)


def chosen(choice: ScalingChoice | None) -> ScalingChoice:
    assert choice is not None
    return choice


def test_too_small_a_fleet_gets_the_cheapest_shape_that_meets_the_targets_with_headroom() -> None:
    state = state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS)

    found = chosen(SCALER.decide(POLICY, state))

    good = [s for s in BOUNDS.shapes() if attained(s, 20.0, POLICY.headroom) >= 0.9]
    assert found.wanted in good
    assert found.wanted.total == min(shape.total for shape in good)
    assert (found.cause, found.allowed, found.bridged) == ("slo", True, True)
    assert found.forecast_before is not None
    assert found.forecast is not None
    assert found.forecast_before.attainment < 0.9 <= found.forecast.attainment
    assert found.forecast.cost == found.wanted.total
    assert "1A1E" in found.reason


def test_brownout_that_keeps_the_targets_until_workers_come_is_a_bridge() -> None:
    # The demand is met as it is, and not with headroom; brownout helps already.
    demand = steady_demand(1.0)
    while attained(FleetShape(1, 1), demand.requests_per_s, POLICY.headroom) >= 0.9:
        demand = steady_demand(demand.requests_per_s + 0.5)
    state = state_of(FleetShape(1, 1), demand, BOUNDS, TARGETS, thresholds=(0.4, 0.3))

    assert chosen(SCALER.decide(POLICY, state)).bridged
    exact = chosen(SCALER.decide(POLICY, replace(state, thresholds=(1.0, 1.0))))
    assert exact.bridged == (attained(FleetShape(1, 1), demand.requests_per_s, 1.0) < 0.9)


def test_a_shape_that_does_not_need_more_is_kept() -> None:
    small = chosen(
        SCALER.decide(POLICY, state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS))
    )

    kept = SCALER.decide(POLICY, state_of(small.wanted, steady_demand(20.0), BOUNDS, TARGETS))
    slightly = SCALER.decide(POLICY, state_of(small.wanted, steady_demand(19.0), BOUNDS, TARGETS))

    assert kept is None
    assert slightly is None  # fewer have to do more than the headroom that more are brought for


def test_too_large_a_fleet_gets_a_cheaper_shape() -> None:
    found = chosen(
        SCALER.decide(POLICY, state_of(FleetShape(8, 8), steady_demand(5.0), BOUNDS, TARGETS))
    )

    assert (found.cause, found.allowed, found.bridged) == ("cost", True, False)
    assert attained(found.wanted, 5.0, 1.3) >= 0.9
    assert found.wanted.total < 8
    assert "less than 8A8E" in found.reason


def test_the_costs_of_both_sides_decide_between_shapes() -> None:
    state = state_of(FleetShape(1, 1), steady_demand(25.0), BOUNDS, TARGETS)
    dear_attention = ScalingPolicy(mode="auto", attention_cost=5.0)
    dear_experts = ScalingPolicy(mode="auto", expert_cost=5.0)

    few_attention = chosen(SCALER.decide(dear_attention, state)).wanted
    few_experts = chosen(SCALER.decide(dear_experts, state)).wanted

    assert few_attention.attention <= few_experts.attention
    assert few_attention.experts >= few_experts.experts
    assert few_attention != few_experts


@pytest.mark.parametrize(
    "changes",
    [
        {"attainment": 0.5},
        {"waiting": 50},
        {"thresholds": (1.0, 0.7)},
    ],
    ids=["late", "queue", "brownout"],
)
def test_workers_do_not_go_while_not_all_is_calm(changes: dict[str, object]) -> None:
    state = state_of(FleetShape(8, 8), steady_demand(5.0), BOUNDS, TARGETS, **changes)  # type: ignore[arg-type]  # one of them each

    found = SCALER.decide(POLICY, state)

    assert found is None  # nor do more come, since bounds forbid it


def test_workers_do_not_go_before_enough_of_the_window_was_seen() -> None:
    short = steady_demand(5.0, window_s=20.0)

    assert SCALER.decide(POLICY, state_of(FleetShape(8, 8), short, BOUNDS, TARGETS)) is None


def test_workers_do_not_go_while_one_of_them_is_silent() -> None:
    state = replace(state_of(FleetShape(8, 8), NOTHING, BOUNDS, TARGETS), heard=False)

    assert SCALER.decide(POLICY, state) is None


def test_where_nothing_was_told_nothing_changes() -> None:
    for waiting in (0, 50):
        state = state_of(FleetShape(4, 4), demand_of([], 0.0), BOUNDS, TARGETS, waiting=waiting)
        found = SCALER.decide(POLICY, state)
        assert found is None or found.wanted.total > 8


def test_workers_that_have_crashed_are_not_taken_for_gone() -> None:
    state = replace(
        state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS), intended=FleetShape(8, 8)
    )

    assert SCALER.decide(POLICY, state) is None
    assert chosen(SCALER.decide(POLICY, replace(state, intended=FleetShape(1, 2)))).wanted.total > 3


def test_without_requests_the_least_shape_is_enough() -> None:
    found = chosen(SCALER.decide(POLICY, state_of(FleetShape(4, 3), NOTHING, BOUNDS, TARGETS)))

    assert (found.wanted, found.cause) == (FleetShape(1, 1), "cost")


def test_a_saving_below_the_policys_gain_is_left_alone() -> None:
    policy = ScalingPolicy(mode="auto", gain=0.9)

    assert SCALER.decide(policy, state_of(FleetShape(4, 3), NOTHING, BOUNDS, TARGETS)) is None


@pytest.mark.parametrize(("waiting", "cause"), [(0, "slo"), (50, "slo")])
def test_targets_missed_against_the_forecast_bring_more_of_the_busier_side(
    waiting: int, cause: str
) -> None:
    state = state_of(
        FleetShape(4, 4), steady_demand(10.0), BOUNDS, TARGETS, attainment=0.5, waiting=waiting
    )

    found = chosen(SCALER.decide(POLICY, state))

    before = found.forecast_before
    assert before is not None
    is_attention = before.attention_busy >= before.experts_busy
    assert found.wanted == (FleetShape(5, 4) if is_attention else FleetShape(4, 5))
    assert (found.cause, found.bridged) == (cause, True)
    assert "50% of the requests" in found.reason


def test_a_queue_that_takes_longer_than_first_tokens_may_brings_more() -> None:
    state = state_of(FleetShape(4, 4), steady_demand(10.0), BOUNDS, TARGETS, waiting=6)

    found = chosen(SCALER.decide(POLICY, state))

    assert found.cause == "queue"
    assert found.wanted.total == 9
    assert "6 requests wait" in found.reason


def test_a_few_late_requests_of_few_say_nothing() -> None:
    few = demand_of([(1.0, 64, 16), (2.0, 64, 16)], 120.0)
    state = state_of(FleetShape(1, 1), few, BOUNDS, TARGETS, attainment=0.5)

    assert SCALER.decide(POLICY, state) is None


def test_where_bounds_forbid_enough_the_best_shape_within_them_is_chosen() -> None:
    bounds = bounds_of((1, 1), (2, 2))

    found = chosen(
        SCALER.decide(POLICY, state_of(FleetShape(1, 1), steady_demand(60.0), bounds, TARGETS))
    )
    there = SCALER.decide(POLICY, state_of(found.wanted, steady_demand(60.0), bounds, TARGETS))

    assert found.wanted.total > 2
    assert "cannot be reached within bounds" in found.reason
    assert there is None


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((9, 4), (8, 4)), ((0, 4), (1, 4)), ((9, 0), (8, 1))],
)
@pytest.mark.parametrize("scaler", [SCALER, BLIND], ids=["known", "unknown"])
def test_a_fleet_outside_bounds_gets_into_them_at_once(
    shape: tuple[int, int], wanted: tuple[int, int], scaler: Scaler
) -> None:
    policy = ScalingPolicy(mode="advise")
    recent = action_of(FleetShape(4, 4), at=999.0, up=True)
    state = state_of(FleetShape(*shape), steady_demand(5.0), BOUNDS, TARGETS, action=recent)

    found = chosen(scaler.decide(policy, state))

    assert (found.wanted, found.cause, found.allowed) == (FleetShape(*wanted), "bounds", True)


def test_an_action_that_the_policys_numbers_no_longer_allow_is_corrected() -> None:
    policy = ScalingPolicy(mode="auto", max_attention=3)
    bounds = bounds_of((1, 1), (3, 8))
    action = action_of(FleetShape(5, 5), at=999.0, up=True)

    found = chosen(
        SCALER.decide(
            policy, state_of(FleetShape(2, 5), steady_demand(5.0), bounds, TARGETS, action=action)
        )
    )

    assert (found.wanted, found.cause, found.allowed) == (FleetShape(3, 5), "bounds", True)


def test_a_shape_that_is_on_its_way_is_not_chosen_again() -> None:
    missed = state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS)
    wanted = chosen(SCALER.decide(POLICY, missed)).wanted

    coming = state_of(
        FleetShape(1, 1),
        steady_demand(20.0),
        BOUNDS,
        TARGETS,
        action=action_of(wanted, at=500.0, up=True),
        attainment=0.1,
        waiting=100,
    )

    assert SCALER.decide(POLICY, coming) is None
    # In mode advise the last action does not count: the same is advised again.
    assert chosen(SCALER.decide(ScalingPolicy(mode="advise"), coming)).wanted == wanted


@pytest.mark.parametrize(
    ("since_s", "is_allowed"), [(0.0, False), (59.0, False), (60.0, True), (500.0, True)]
)
def test_after_an_action_the_fleet_cools_down(since_s: float, is_allowed: bool) -> None:
    action = action_of(FleetShape(1, 1), at=1000.0 - since_s, up=False)
    state = state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS, action=action)

    found = chosen(SCALER.decide(POLICY, state))

    assert found.allowed == is_allowed == (found.held == "")


@pytest.mark.parametrize(
    ("up", "since_s", "is_allowed"),
    [(True, 90.0, False), (True, 120.0, True), (False, 90.0, True), (None, 90.0, True)],
)
def test_workers_that_came_do_not_go_for_twice_as_long(
    up: bool | None, since_s: float, is_allowed: bool
) -> None:
    action = action_of(FleetShape(6, 6), at=1000.0 - since_s, up=up)
    state = state_of(FleetShape(6, 6), steady_demand(5.0), BOUNDS, TARGETS, action=action)

    found = chosen(SCALER.decide(POLICY, state))

    assert found.cause == "cost"
    assert found.allowed == is_allowed


def test_workers_that_went_come_back_early_only_if_targets_are_missed() -> None:
    enough = chosen(
        SCALER.decide(POLICY, state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS))
    ).wanted
    action = action_of(enough, at=1000.0 - 90.0, up=False)

    # More load than the headroom is for, but not more than can be served; and more than that.
    held = chosen(
        SCALER.decide(POLICY, state_of(enough, steady_demand(22.5), BOUNDS, TARGETS, action=action))
    )
    let = chosen(
        SCALER.decide(POLICY, state_of(enough, steady_demand(40.0), BOUNDS, TARGETS, action=action))
    )

    assert (held.allowed, held.bridged) == (False, False)
    assert "take back" in held.held
    assert (let.allowed, let.bridged) == (True, True)


def test_a_part_that_is_gone_is_made_up_for() -> None:
    enough = chosen(
        SCALER.decide(POLICY, state_of(FleetShape(1, 1), steady_demand(20.0), BOUNDS, TARGETS))
    ).wanted
    less = FleetShape(enough.attention, enough.experts - 1)
    bounds = bounds_of((1, 1), (8, less.experts))  # it cannot be brought back
    action = action_of(enough, at=0.0, up=True)

    found = SCALER.decide(
        POLICY, state_of(less, steady_demand(20.0), bounds, TARGETS, action=action)
    )

    assert found is None or found.cause == "load"
    more = chosen(
        SCALER.decide(POLICY, state_of(less, steady_demand(30.0), bounds, TARGETS, action=action))
    )
    assert more.cause == "load"


@pytest.mark.parametrize(
    ("changes", "wanted", "cause"),
    [
        ({"attainment": 0.5, "ttft_p90_s": 2.0, "tpot_p90_s": 0.01}, (3, 2), "slo"),
        ({"attainment": 0.5, "ttft_p90_s": 0.6, "tpot_p90_s": 0.5}, (2, 3), "slo"),
        ({"waiting": 50}, (3, 2), "queue"),
        ({"thresholds": (0.5, 1.0)}, (3, 2), "slo"),
        ({"thresholds": (1.0, 0.5)}, (2, 3), "slo"),
    ],
)
def test_without_known_costs_one_worker_comes_where_tokens_are_late(
    changes: dict[str, object], wanted: tuple[int, int], cause: str
) -> None:
    state = state_of(FleetShape(2, 2), steady_demand(5.0), BOUNDS, TARGETS, **changes)  # type: ignore[arg-type]  # some of them

    found = chosen(BLIND.decide(POLICY, state))

    assert (found.wanted, found.cause) == (FleetShape(*wanted), cause)
    assert (found.forecast, found.forecast_before) == (None, None)
    assert "costs are not known" in found.reason


def test_without_known_costs_none_go_and_the_other_side_helps_where_one_is_full() -> None:
    calm = state_of(FleetShape(8, 8), NOTHING, BOUNDS, TARGETS)
    full = state_of(FleetShape(8, 2), steady_demand(5.0), BOUNDS, TARGETS, waiting=50)

    assert BLIND.decide(POLICY, calm) is None
    assert chosen(BLIND.decide(POLICY, full)).wanted == FleetShape(8, 3)


def test_decisions_are_the_same_each_time() -> None:
    random = np.random.default_rng(3)
    demand = demand_of(
        [
            (float(at), int(random.integers(1, 200)), int(random.integers(1, 40)))
            for at in random.uniform(0, 120, 900)
        ],
        120.0,
    )
    state = state_of(FleetShape(3, 2), demand, BOUNDS, TARGETS)

    assert Scaler(TIMES, LIMITS).decide(POLICY, state) == SCALER.decide(POLICY, state)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 2), (2, 3), True),
        ((2, 2), (1, 3), True),
        ((2, 2), (1, 2), False),
        ((2, 2), (2, 2), None),
    ],
)
def test_an_action_goes_up_if_either_side_gets_workers(
    before: tuple[int, int], after: tuple[int, int], expected: bool | None
) -> None:
    assert grows(FleetShape(*before), FleetShape(*after)) is expected
