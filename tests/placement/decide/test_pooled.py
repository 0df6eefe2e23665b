import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import PlacementInfeasible
from moesaic.placement.decide.pooled import fill


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[list[list[int]]], list[int]]:
    num_experts, num_layers = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_workers = draw(st.integers(1, 4))
    experts = st.lists(st.integers(-1, num_experts - 1), unique=True, max_size=num_experts)
    held = draw(
        st.lists(
            st.lists(experts, min_size=num_workers, max_size=num_workers),
            min_size=num_layers,
            max_size=num_layers,
        )
    )
    capacities = st.lists(st.integers(0, 20), min_size=num_workers, max_size=num_workers)
    return num_experts, held, draw(capacities)


@given(problems())
def test_every_expert_is_held_and_no_worker_holds_more_than_it_can(
    problem: tuple[int, list[list[list[int]]], list[int]],
) -> None:
    num_experts, held, capacities = problem
    room = sum(min(each, len(held) * num_experts) for each in capacities)
    if room < len(held) * num_experts:
        with pytest.raises(PlacementInfeasible) as error:
            fill(num_experts, held, capacities)
        assert error.value.missing_slots == len(held) * num_experts - room
        return

    filled = fill(num_experts, held, capacities)

    for layer in filled:
        assert set().union(*layer) == set(range(num_experts))
        assert all(len(set(mine)) == len(mine) for mine in layer)
    totals = np.array([[len(mine) for mine in layer] for layer in filled]).sum(axis=0)
    assert totals.tolist() == [min(each, len(held) * num_experts) for each in capacities]


@given(problems())
def test_what_is_complete_stays_as_it_is(
    problem: tuple[int, list[list[list[int]]], list[int]],
) -> None:
    num_experts, held, capacities = problem
    try:
        filled = fill(num_experts, held, capacities)
    except PlacementInfeasible:
        return

    assert fill(num_experts, filled, capacities) == filled


def test_when_a_worker_leaves_the_others_keep_what_they_have() -> None:
    held = [[[0, 1], [2, 3]], [[0], [1, 2]]]  # expert 3 of the second layer has gone

    filled = fill(4, held, [4, 4])

    for before, after in zip(held, filled, strict=True):
        for had, has in zip(before, after, strict=True):
            assert set(had) <= set(has)
    assert filled[1][0] == [0, 3]  # where there is most room
