"""Measurements in, seconds by term out, beside scipy's least squares as the oracle."""

import math
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from moesaic.costs import CostBook, CostFit, RandomChoice, fitted, merged, model_of_fleet
from moesaic.messages.performance import PART_TERMS, UNKNOWN, FitSums, PartCost, PerformanceModel

TERMS = "step", "row", "key"
amounts = st.tuples(st.just(1.0), st.floats(1, 512), st.floats(1, 1e5))
costs = st.tuples(st.floats(0, 1e-2), st.floats(0, 1e-4), st.floats(0, 1e-6)).filter(
    lambda unit_s: sum(unit_s) > 1e-9
)


def learned(rows: list[tuple[tuple[float, ...], float]], forget: float = 1.0) -> CostFit:
    fit = CostFit(TERMS, forget)
    for each, seconds in rows:
        fit.add(each, seconds)
    return fit


@given(st.lists(st.tuples(amounts, st.floats(1e-4, 1.0)), min_size=1, max_size=40))
def test_the_fit_is_the_least_squares_without_negative_terms(
    rows: list[tuple[tuple[float, ...], float]],
) -> None:
    left = np.array([np.array(each) / seconds for each, seconds in rows])
    right = np.ones(len(rows))
    products = left.T @ left
    sums = FitSums(
        products=tuple(map(tuple, products.tolist())),
        responses=tuple((left.T @ right).tolist()),
        squares=float(len(rows)),
        weight=float(len(rows)),
        squared_weight=float(len(rows)),
    )

    found = np.array(fitted(TERMS, sums).unit_s)

    scale = np.linalg.norm(left, axis=0)
    _, least = nnls(left / scale, right)
    assert (found >= 0).all()
    assert np.linalg.norm(left @ found - right) <= least + 1e-4 * math.sqrt(len(rows))


@given(costs, st.lists(amounts, min_size=8, max_size=40), amounts)
def test_what_lies_on_a_plane_is_predicted(
    unit_s: tuple[float, ...], seen: list[tuple[float, ...]], asked: tuple[float, ...]
) -> None:
    true = PartCost(terms=TERMS, unit_s=unit_s)
    fit = learned([(each, true.seconds(*each)) for each in seen if true.seconds(*each) > 0])
    least = min((true.seconds(*each) for each in seen), default=0.0)

    for each in seen:
        if true.seconds(*each) > 0 and least > 0:
            assert fit.cost().seconds(*each) == pytest.approx(true.seconds(*each), rel=2e-3)
    assert fit.cost().seconds(*asked) >= 0


@given(st.floats(1, 100), st.floats(0.001, 1))
def test_steps_that_are_all_alike_cost_by_the_row(rows: float, seconds: float) -> None:
    fit = CostFit(("step", "row"))
    for _ in range(20):
        fit.add((1, rows), seconds)

    assert fit.cost().unit_s[0] == 0
    assert fit.cost().seconds(1, 3 * rows) == pytest.approx(3 * seconds)


def test_noise_does_not_bias_the_mean_and_error_bars_hold_the_truth() -> None:
    true, within = PartCost(terms=TERMS, unit_s=(1e-3, 1e-4, 1e-6)), 0
    for seed in range(40):
        random, fit = Random(seed), CostFit(TERMS, 1.0)
        for _ in range(400):
            each = 1.0, random.uniform(1, 64), random.uniform(1, 5000)
            noise = random.lognormvariate(-0.045, 0.3)  # of mean 1
            fit.add(each, true.seconds(*each) * noise)
        asked = 1.0, 32.0, 2500.0
        estimate = fit.cost().at(asked)
        within += abs(estimate.seconds - true.seconds(*asked)) <= 2 * estimate.error_s
        assert estimate.spread_s == pytest.approx(0.3 * estimate.seconds, rel=0.25)
        assert estimate.seconds == pytest.approx(true.seconds(*asked), rel=0.08)
    assert within >= 32  # 95 of 100, were errors normal


def test_work_of_a_new_kind_is_learned_in_some_steps() -> None:
    true, fit = (
        PartCost(terms=("step", "row", "key"), unit_s=(2e-3, 2.5e-4, 0.0)),
        CostFit(TERMS, 0.999),
    )
    for i in range(40):
        fit.add((1, 0, 100 + i), true.seconds(1, 0, 100 + i))
    for i in range(100):
        rows = 1000.0 if i % 5 == 0 else 0.0
        fit.add((1, rows, 100 + i), true.seconds(1, rows, 100 + i))

    assert fit.cost().seconds(1, 1000, 100) == pytest.approx(true.seconds(1, 1000, 100), rel=0.35)


def test_where_rows_and_keys_grow_alike_rows_cost() -> None:
    fit = CostFit(PART_TERMS["step"])
    for _ in range(50):  # prompts of one length
        fit.add((1, 20, 8, 0, 0, 36), 0.004)

    assert fit.cost().seconds(1, 32, 1000, 0, 0, 500_500) == pytest.approx(0.5, rel=0.01)


def test_where_all_experts_were_always_active_they_are_not_told_from_the_step() -> None:
    fit, choice = CostFit(PART_TERMS["step"]), RandomChoice(32, 4)
    for rows in range(200, 500, 7):
        fit.add((1, choice.experts(rows), rows, 0, 0, 0), 0.02 + 1e-5 * rows)

    assert fit.cost().seconds(1, choice.experts(1), 1, 0, 0, 0) == pytest.approx(0.02, rel=0.02)


def test_newer_measurements_win() -> None:
    fit = CostFit(("step",), forget=0.9)
    for seconds in [0.1] * 50 + [0.2] * 50:
        fit.add((1,), seconds)

    assert fit.cost().seconds(1) == pytest.approx(0.2, rel=0.02)


def test_a_machine_that_stopped_for_a_while_does_not_spoil_the_fit() -> None:
    fit = CostFit(("step", "row"), forget=0.99)
    for i in range(200):
        fit.add((1, 1 + i % 7), (1 + i % 7) * 1e-3 * (1000 if i == 150 else 1))

    assert fit.cost().seconds(1, 5) == pytest.approx(5e-3, rel=0.25)


@given(st.lists(st.tuples(amounts, st.floats(1e-4, 1.0)), min_size=4, max_size=30))
def test_the_sums_of_two_workers_are_the_fit_of_both(
    rows: list[tuple[tuple[float, ...], float]],
) -> None:
    half = len(rows) // 2
    parts = [learned(rows[:half]).sums(), learned(rows[half:]).sums()]

    together = merged(parts)

    assert together.weight == pytest.approx(len(rows))
    assert together.squares == pytest.approx(sum(each.squares for each in parts))


def test_sums_of_unlike_parts_are_refused() -> None:
    fit, other = CostFit(("a",)), CostFit(("a", "b"))
    fit.add((1,), 1.0)
    other.add((1, 2), 1.0)

    with pytest.raises(ValueError, match="same terms"):
        merged([fit.sums(), other.sums()])


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_teach_nothing(seconds: float) -> None:
    fit = CostFit(("step",))
    fit.add((1,), seconds)

    assert not fit.is_known


def test_the_model_of_a_fleet_leaves_out_parts_of_another_version() -> None:
    one, other = CostBook(), CostBook()
    one.add("experts", (1, 4, 32), 0.002)
    other.add("experts", (1, 8, 64), 0.004)
    other.add("head", (1, 4), 0.001)
    told = [one.sums(), {**other.sums(), "unheard": one.sums()["experts"]}]
    told[0]["head"] = FitSums(products=((1.0,),), responses=(1.0,), weight=1.0, squared_weight=1.0)

    model = model_of_fleet(told, device="d")

    assert set(model.parts) == {"experts", "head"}
    assert model.parts["experts"].terms == PART_TERMS["experts"]
    assert model.at("experts", (1, 6, 48)).seconds == pytest.approx(0.003, rel=0.05)
    assert model.at("attention", (1, 1, 1)) == UNKNOWN


def test_a_model_is_data() -> None:
    book = CostBook()
    for rows in range(1, 20):
        book.add("head", (1, rows), 1e-3 + 1e-4 * rows)
    model = model_of_fleet([book.sums()], "h100", "measured")

    assert msgspec.json.decode(msgspec.json.encode(model), type=PerformanceModel) == model
