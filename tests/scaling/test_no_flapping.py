"""Fleets over time: whatever the load does, actions keep their distance, and none is taken back for noise."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.messages.scaling import FleetShape, ScalingAction, ScalingPolicy
from moesaic.scaling import Scaler, forecast, grows
from moesaic.scaling.contract import Objectives, ScalingState, ServingLimits
from tests.scaling.fleets import EvenTimes, bounds_of, demand_of, state_of

WINDOW_S, EVERY_S = 60.0, 10.0
BOUNDS = bounds_of((1, 1), (5, 4))
TARGETS = Objectives(ttft_s=0.5, tpot_s=0.05)
TIMES = EvenTimes(step_s=2.0**-8, row_s=2.0**-11, key_s=0.0, experts_s=2.0**-10)
LIMITS = ServingLimits(max_num_seqs=16, max_num_batched_tokens=64)


def arrivals_of(rates: list[float], random: np.random.Generator) -> list[tuple[float, int, int]]:
    """Draw requests with one rate for each ``EVERY_S`` seconds, the first rate lasting for a window before."""
    found: list[tuple[float, int, int]] = []
    for begin_s, seconds, per_s in [
        (-WINDOW_S, WINDOW_S, rates[0]),
        *((i * EVERY_S, EVERY_S, per_s) for i, per_s in enumerate(rates)),
    ]:
        number = random.poisson(per_s * seconds)
        found += zip(
            random.uniform(begin_s, begin_s + seconds, number).tolist(),
            random.integers(1, 100, number).tolist(),
            random.integers(1, 12, number).tolist(),
            strict=True,
        )
    return found


def is_missed(state: ScalingState) -> bool:
    """Look anew, without the scaler: are targets missed by the fleet that there is?"""
    measured = state.attainment is not None and state.attainment < state.objectives.attainment
    found = forecast(state.demand, state.shape, TIMES, LIMITS, state.objectives)
    return (measured and len(state.demand) >= 10) or found.attainment < state.objectives.attainment


def over_time(
    scaler: Scaler,
    policy: ScalingPolicy,
    rates: list[float],
    delay_s: float,
    random: np.random.Generator,
    noisy: bool,
) -> list[tuple[ScalingState, ScalingAction]]:
    """Have a scaler decide each ``EVERY_S`` seconds, workers coming and going ``delay_s`` later; return actions."""
    shape, action, done = FleetShape(1, 1), None, list[tuple[ScalingState, ScalingAction]]()
    arrivals = arrivals_of(rates, random)
    for i in range(len(rates)):
        now_s = i * EVERY_S
        if action is not None and now_s - action.at >= delay_s:
            shape = action.shape
        begin_s = now_s - WINDOW_S
        demand = demand_of(
            [(at - begin_s, *sizes) for at, *sizes in arrivals if begin_s < at <= now_s], WINDOW_S
        )
        state = state_of(
            shape,
            demand,
            BOUNDS,
            TARGETS,
            now_s=now_s,
            action=action,
            attainment=float(random.uniform(0.7, 1.0)) if noisy and len(demand) else None,
            waiting=int(random.integers(0, 20)) if noisy else 0,
        )
        choice = scaler.decide(policy, state)
        if choice is None or not choice.allowed:
            continue
        before = action.shape if action is not None else shape
        up = grows(before, choice.wanted)
        assert up is not None, "an action changes something"
        action = ScalingAction(number=len(done) + 1, shape=choice.wanted, at=now_s, up=up)
        done.append((state, action))
    return done


@given(
    rates=st.lists(st.sampled_from([0.0, 1.0, 4.0, 8.0, 14.0, 25.0]), min_size=5, max_size=25),
    cool_down_s=st.sampled_from([0.0, 15.0, 30.0, 60.0]),
    headroom=st.sampled_from([1.0, 1.2, 1.5]),
    expert_cost=st.sampled_from([0.5, 1.0, 3.0]),
    delay_s=st.sampled_from([0.0, 10.0, 45.0]),
    seed=st.integers(0, 2**32 - 1),
    noisy=st.booleans(),
    is_known=st.booleans(),
)
@settings(max_examples=100)
def test_actions_keep_their_distance_and_none_is_taken_back_early_unless_targets_are_missed(
    rates: list[float],
    cool_down_s: float,
    headroom: float,
    expert_cost: float,
    delay_s: float,
    seed: int,
    noisy: bool,
    is_known: bool,
) -> None:
    policy = ScalingPolicy(
        mode="auto",
        cool_down_s=cool_down_s,
        headroom=headroom,
        expert_cost=expert_cost,
        window_s=WINDOW_S,
    )
    scaler = Scaler(TIMES if is_known else None, LIMITS)

    done = over_time(scaler, policy, rates, delay_s, np.random.default_rng(seed), noisy)

    for (_, before), (state, after) in itertools.pairwise(done):
        assert after.at - before.at >= cool_down_s
        is_opposite = before.up != after.up
        if is_opposite and after.at - before.at < 2 * cool_down_s:
            assert after.up
            assert is_missed(state)


# Seed 3 leads to the most actions of these.
@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3))])
def test_a_steady_load_is_hardly_followed_in_its_noise(seed: int) -> None:
    policy = ScalingPolicy(mode="auto", window_s=WINDOW_S, cool_down_s=20.0)
    rates = [10.0] * 90  # a quarter of an hour

    done = over_time(Scaler(TIMES, LIMITS), policy, rates, 10.0, np.random.default_rng(seed), False)

    assert len(done) <= 3


def test_a_load_that_doubles_and_halves_is_followed_both_ways() -> None:
    policy = ScalingPolicy(mode="auto", window_s=WINDOW_S, cool_down_s=20.0)
    rates = ([5.0] * 15 + [12.0] * 15) * 2 + [5.0] * 15

    done = over_time(Scaler(TIMES, LIMITS), policy, rates, 10.0, np.random.default_rng(1), False)

    totals = [action.shape.total for _, action in done]
    ups = [action.at for _, action in done if action.up]
    assert sum(150 <= at < 230 for at in ups) >= 1
    assert sum(450 <= at < 530 for at in ups) >= 1
    assert totals[-1] < max(totals)
