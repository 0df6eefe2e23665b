"""Shifts of what origins route are seen, once each; noise is not."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moesaic.placement.traffic.drift import DriftTest
from moesaic.placement.traffic.origins import OriginTraffic
from tests.placement.traffic.origin_windows import LAYERS, NUM_EXPERTS, Tasks, window

Mix = tuple[float, float, float, float]
EVEN: Mix = (0.25, 0.25, 0.25, 0.25)
# Every single-line fault of the test of drift that some of 60 seeds find, one of these finds too.
TELLING = (0, 4, 9, 14)
telling_and_all = pytest.mark.parametrize(
    "telling", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["telling", "all"]
)


def seeds_of(num: int, telling: bool) -> Sequence[int]:
    return TELLING if telling else range(num)


def traffic() -> OriginTraffic:
    return OriginTraffic(NUM_EXPERTS, LAYERS, half_life_s=300.0)


def shifts(
    seed: int,
    num_windows: int,
    mix_at: Callable[[int], Sequence[float]],
    prompts_at: Callable[[int], float],
) -> list[int]:
    """The windows that showed a shift."""
    tasks, seen = Tasks(seed), traffic()
    return [
        i
        for i in range(num_windows)
        if seen.add(window("a", *tasks.draw(mix_at(i), prompts_at(i))), 10.0 * i)
    ]


@telling_and_all
@pytest.mark.parametrize(
    ("mix", "prompts", "num_seeds"),
    [((0.7, 0.3, 0, 0), 4, 60), (EVEN, 6, 15), ((1, 0, 0, 0), 1, 15), ((0.95, 0.05, 0, 0), 2, 15)],
)
def test_noise_is_no_shift(mix: Mix, prompts: float, num_seeds: int, telling: bool) -> None:
    for seed in seeds_of(num_seeds, telling):
        assert shifts(seed, 60, lambda _: mix, lambda _: prompts) == [], seed


@telling_and_all
@pytest.mark.parametrize("rates", [(20, 1.5), (2, 20)])
def test_another_rate_is_no_shift(rates: tuple[float, float], telling: bool) -> None:
    for seed in seeds_of(12, telling):
        found = shifts(seed, 70, lambda _: EVEN, lambda i: rates[i >= 35])
        assert found == [], seed


@telling_and_all
@pytest.mark.parametrize(
    ("before", "after", "at", "soon", "num_seeds"),
    [
        ((1, 0, 0, 0), (0, 1, 0, 0), 35, 5, 60),
        ((0.8, 0.2, 0, 0), (0, 0, 0.2, 0.8), 35, 8, 15),
        # Where much varies, it takes longer, and with less history than this much longer still.
        (EVEN, (0, 0, 0, 1), 60, 16, 15),
    ],
)
def test_another_task_is_seen_soon_and_once(
    before: Mix, after: Mix, at: int, soon: int, num_seeds: int, telling: bool
) -> None:
    for seed in seeds_of(num_seeds, telling):
        assert Tasks(seed).distance(before, after) >= 0.2
        found = shifts(seed, at + 25, lambda i: after if i >= at else before, lambda _: 8)
        assert len(found) == 1, (seed, found)
        assert at <= found[0] <= at + soon, (seed, found)


def test_origins_that_exchange_their_tasks_settle_together_on_new_data_alone() -> None:
    one, other = (1, 0, 0, 0), (0, 1, 0, 0)
    for seed in range(8):
        tasks, seen = Tasks(seed), traffic()
        plannable: list[int] = []
        new = {origin: np.zeros((len(LAYERS), NUM_EXPERTS)) for origin in "ab"}
        for i in range(70):
            for origin, mix in zip("ab", (one, other) if i < 35 else (other, one), strict=True):
                drawn = tasks.draw(mix, 8)
                shifted = seen.add(window(origin, *drawn), 10.0 * i)
                new[origin] = (
                    np.zeros_like(new[origin]) if shifted or i < 35 else new[origin] + drawn[0]
                )
            if seen.shifts.total() == 2 and not seen.settling(10.0 * i):
                plannable.append(i)
        assert seen.shifts == {"a": 1, "b": 1}
        assert plannable == list(range(plannable[0], 70))
        assert plannable[0] <= 35 + 14
        for n, rates in enumerate(seen.demand(["a", "b"], 690.0)):
            assert not rates[new["ab"[n]] == 0].any()


def test_after_a_shift_nothing_from_before_is_in_the_demand() -> None:
    old, new = np.zeros((3, NUM_EXPERTS)), np.zeros((3, NUM_EXPERTS))
    old[:, :6], new[:, 6:12] = 100, 100
    seen = traffic()
    for i in range(30):
        seen.add(window("a", old, 300), 10.0 * i)
    at = next(i for i in range(30, 40) if seen.add(window("a", new, 300), 10.0 * i))

    assert seen.last_shift_s == 10.0 * at
    assert not seen.seen(["a"])[0]
    assert not seen.demand(["a"], 10.0 * at).any()
    assert seen.settling(10.0 * at) == {"a"}
    for i in range(1, 7):
        assert seen.settling(10.0 * at) == {"a"}
        seen.add(window("a", new, 300), 10.0 * (at + i))
        rates = seen.demand(["a"], 10.0 * (at + i))[0]
        assert not rates[:, :6].any()
        np.testing.assert_allclose(rates[:, 6:12], 10.0)
    assert seen.settling(10.0 * at) == set()


def test_a_slow_change_is_seen_in_the_end() -> None:
    for seed in range(3):
        found = shifts(seed, 260, lambda i: (p := min(1.0, i / 200), 1 - p, 0, 0), lambda _: 8)
        assert found, seed


def test_windows_with_few_rows_show_nothing() -> None:
    test = DriftTest()
    for expert in range(12):  # each other than all before
        few = np.zeros((2, 12))
        few[:, expert] = 3
        assert test.add(few, 3) == 0
    assert test.num_units == 0


def test_who_falls_silent_and_comes_back_has_not_shifted() -> None:
    tasks, seen = Tasks(3), traffic()
    times = [10.0 * i for i in range(40)] + [1e5 + 10.0 * i for i in range(40)]

    for now_s in times:
        seen.add(window("a", *tasks.draw(EVEN, 6)), now_s)

    assert not seen.shifts
    assert seen.demand(["a"], times[-1]).sum() > 0


def test_plans_do_not_wait_for_ever_for_who_fell_silent() -> None:
    tasks, seen = Tasks(0), traffic()
    for i in range(60):
        seen.add(window("a", *tasks.draw((0, 1, 0, 0) if i >= 30 else (1, 0, 0, 0), 8)), 10.0 * i)
        if seen.shifts:
            break
    since_s = seen.last_shift_s
    assert since_s is not None

    assert seen.settling(since_s + 299) == {"a"}
    assert seen.settling(since_s + 300) == set()


def test_layers_without_rows_are_no_drift() -> None:
    both, first = np.full((2, 4), 100.0), np.array([[100.0] * 4, [0] * 4])
    test = DriftTest()

    assert not any(test.add(tokens, 300) for tokens in [both] * 20 + [first] * 20)


def test_what_is_forgotten_is_begun_anew() -> None:
    tasks, seen = Tasks(0), traffic()
    for i in range(30):
        seen.add(window("a", *tasks.draw((1, 0, 0, 0), 8)), 10.0 * i)
    seen.forget("a")
    seen.forget("never seen")
    assert seen.origins == frozenset()

    for i in range(30, 60):
        assert not seen.add(window("a", *tasks.draw((0, 1, 0, 0), 8)), 10.0 * i)
