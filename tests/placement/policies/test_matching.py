"""The exact b-matching, beside HiGHS and beside trying everything."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from moesaic.errors import PlacementInfeasible
from moesaic.placement.policies.matching import best_holders, whole_worth


def most_worth(worth: Any, budget: Any, most: Any) -> float | None:
    """The optimum of the linear program, which is integral; None: infeasible."""
    num_groups, num_experts, num_instances = worth.shape
    group, expert, instance = (axis.ravel() for axis in np.indices(worth.shape))
    columns, ones = np.arange(worth.size), np.ones(worth.size)
    rows = [
        sparse.csr_array((ones, (instance, columns))),
        sparse.csr_array((ones, (group * num_instances + instance, columns))),
        -sparse.csr_array((ones, (group * num_experts + expert, columns))),
    ]
    found = optimize.linprog(
        -worth.ravel().astype(float),
        A_ub=sparse.vstack(rows),
        b_ub=np.concatenate([budget, np.tile(most, num_groups), -np.ones(worth[:, :, 0].size)]),
        bounds=(0, 1),
        method="highs",
    )
    return None if found.status == 2 else -float(found.fun)


@st.composite
def matchings(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Ties, zeros, instances alike, groups that are limited, and budgets that just suffice."""
    num_groups, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    num_instances = draw(st.integers(1, 6))
    shape = num_groups, num_experts, num_instances
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    worth = rng.integers(0, draw(st.sampled_from([1, 2, 5, 10**6])), shape)
    if draw(st.booleans()):
        worth[:] = worth[:, :, :1]  # all want the same
    limited = rng.integers(num_experts // 2, num_experts + 1, num_instances)
    most = limited if draw(st.booleans()) else np.full(num_instances, num_experts)
    total = num_groups * num_experts + draw(
        st.integers(-1, 4)
    )  # what there is, about what is needed
    return worth, rng.multinomial(total, rng.dirichlet(np.ones(num_instances))), most


@settings(max_examples=150, deadline=None)
@given(drawn=matchings())
def test_holders_are_of_most_worth_or_there_are_none(drawn: tuple[Any, Any, Any]) -> None:
    worth, budget, most = drawn
    best, ties = most_worth(worth, budget, most), np.zeros(worth.shape[:2])
    if best is None:
        with pytest.raises(PlacementInfeasible):
            best_holders(worth, ties, budget, most)
        return

    held = best_holders(worth, ties, budget, most)

    assert (worth * held).sum() == pytest.approx(best)
    assert held.any(axis=2).all()
    assert (held.sum(axis=(0, 1)) <= budget).all()
    assert (held.sum(axis=1) <= most).all()


@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])  # how much all want the same
@pytest.mark.parametrize("limited", [False, True])
def test_large_problems_have_the_optimum_of_the_linear_program(alike: float, limited: bool) -> None:
    rng = np.random.default_rng(3)
    mine, all_of_us = rng.gamma(0.3, size=(6, 24, 8)), rng.gamma(0.3, size=(6, 24, 1))
    worth = whole_worth(alike * all_of_us + (1 - alike) * mine)
    budget = np.full(8, 6 * 24 // 8 + 2)
    most = np.full(8, 4 if limited else 24)
    scaled = worth / worth.max()

    held = best_holders(worth, np.zeros(worth.shape[:2]), budget, most)

    best = most_worth(scaled, budget, most)
    assert (scaled * held).sum() == pytest.approx(best, rel=1e-9)
    assert held.any(axis=2).all()


def test_counts_stay_exact_and_the_largest_has_forty_six_bits() -> None:
    worth = whole_worth(np.array([0.0, 1, 3, 2**40 + 1]))

    assert (worth / worth[1]).tolist() == [0, 1, 3, 2**40 + 1]
    assert 2**45 <= worth.max() < 2**46
    assert whole_worth(np.zeros(2)).tolist() == [0, 0]
    assert whole_worth(np.array([1e15, 1e-9])).min() == 0


def test_of_what_is_worth_the_same_instances_take_what_ties_say() -> None:
    worth = np.ones((1, 4, 2), np.int64)

    held = best_holders(worth, np.array([[0.0, 2, 1, 2]]), np.array([4, 2]), np.array([4, 4]))

    assert np.flatnonzero(held[0, :, 1]).tolist() == [1, 3]
