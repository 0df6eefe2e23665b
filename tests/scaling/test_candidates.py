"""The search against a look at all shapes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.messages.scaling import FleetShape, ScalingPolicy
from moesaic.scaling import cheapest, shape_cost
from moesaic.scaling.candidates import FEW_SHAPES
from moesaic.scaling.contract import ShapeBounds
from tests.scaling.fleets import bounds_of

costs = st.sampled_from([0.0, 0.5, 1.0, 1.7, 3.0])


@st.composite
def searches(draw: st.DrawFn) -> tuple[ShapeBounds, dict[FleetShape, float], FleetShape]:
    """Bounds, what each shape would attain, growing with expert workers, and the shape there is."""
    least = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    most = least[0] + draw(st.integers(0, 8)), least[1] + draw(st.integers(0, 10))
    bounds = bounds_of(least, most)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = most[1] - least[1] + 1
    attained = {
        FleetShape(attention, least[1] + i): float(each)
        for attention in range(least[0], most[0] + 1)
        for i, each in enumerate(np.sort(random.random(rows)))
    }
    return bounds, attained, FleetShape(draw(st.integers(0, 12)), draw(st.integers(0, 14)))


def expected(
    policy: ScalingPolicy,
    attained: dict[FleetShape, float],
    near: FleetShape,
    target: float,
    below: float | None,
) -> FleetShape | None:
    """Look at all shapes: the cheapest, with fewest workers of the costlier side, nearest to what there is."""

    def order(shape: FleetShape) -> tuple[float, ...]:
        costlier = 0
        if policy.attention_cost > policy.expert_cost:
            costlier = shape.attention
        elif policy.attention_cost < policy.expert_cost:
            costlier = shape.experts
        moved = abs(shape.attention - near.attention) + abs(shape.experts - near.experts)
        return round(shape_cost(policy, shape), 9), costlier, shape.total, moved, shape.attention

    good = [shape for shape, each in attained.items() if each >= target]
    if below is not None:
        good = [shape for shape in good if shape_cost(policy, shape) <= below + 1e-9]
    return min(good, key=order, default=None)


@given(
    searches(),
    costs,
    costs,
    st.floats(0, 1),
    st.none() | st.integers(0, 30),
    st.booleans(),
)
@settings(max_examples=500)
def test_the_search_finds_what_a_look_at_all_shapes_finds(
    drawn: tuple[ShapeBounds, dict[FleetShape, float], FleetShape],
    attention_cost: float,
    expert_cost: float,
    target: float,
    below: int | None,
    has_guess: bool,
) -> None:
    bounds, attained, near = drawn
    policy = ScalingPolicy(attention_cost=attention_cost, expert_cost=expert_cost)

    def guess(shape: FleetShape) -> float:  # right about what is better, wrong about what is enough
        return 1.3 - attained[shape]

    found = cheapest(
        policy,
        bounds,
        near,
        lambda shape: attained[shape] >= target,
        guess if has_guess else None,
        below,
    )

    assert found == expected(policy, attained, near, target, below)


def test_many_shapes_need_few_looks() -> None:
    looks: set[FleetShape] = set()
    bounds = bounds_of((1, 1), (16, 32))

    def judge(shape: FleetShape) -> bool:
        looks.add(shape)
        return shape.attention >= 5 and shape.experts >= 11

    found = cheapest(
        ScalingPolicy(),
        bounds,
        FleetShape(16, 32),
        judge,
        lambda shape: max(5.5 / shape.attention, 10.5 / shape.experts),
    )

    assert len(bounds.shapes()) > 10 * FEW_SHAPES
    assert found == FleetShape(5, 11)
    assert len(looks) <= 2 * 16


def test_where_more_expert_workers_do_harm_the_guess_tells_where_to_look() -> None:
    good = {FleetShape(m, n) for m, n in itertools.product(range(4, 9), range(8, 12))}

    found = cheapest(
        ScalingPolicy(),
        bounds_of((1, 1), (16, 32)),
        FleetShape(16, 32),
        good.__contains__,
        lambda shape: 0.8 + abs(shape.experts - 10) / 8,
    )

    assert found == FleetShape(4, 8)


def test_of_equal_costs_fewer_workers_of_the_costlier_side_win() -> None:
    policy = ScalingPolicy(attention_cost=2.0, expert_cost=1.0)

    found = cheapest(
        policy,
        bounds_of((1, 1), (4, 4)),
        FleetShape(2, 1),
        lambda shape: 2 * shape.attention + shape.experts >= 5,
    )

    assert found == FleetShape(1, 3)


@pytest.mark.parametrize("near", [(1, 3), (3, 1), (2, 2)])
def test_of_equal_costs_the_nearest_shape_wins(near: tuple[int, int]) -> None:
    found = cheapest(
        ScalingPolicy(),
        bounds_of((1, 1), (4, 4)),
        FleetShape(*near),
        lambda shape: shape.total >= 4,
    )

    assert found == FleetShape(*near)
