import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.placement.schedule.assignment import NO_HOLDER, assign_holders

cases = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.lists(st.integers(0, n - 1), unique=True, max_size=n), min_size=1, max_size=24),
        st.sets(st.integers(0, n - 1)),
    )
)


@given(cases)
def test_an_expert_is_served_by_a_live_holder_or_by_nobody(
    case: tuple[int, list[list[int]], set[int]],
) -> None:
    num_workers, holders, live = case

    serving = assign_holders(holders, num_workers, sorted(live))

    for held, chosen in zip(holders, serving, strict=True):
        possible = set(held) & live
        assert (chosen == NO_HOLDER) if not possible else (int(chosen) in possible)


@given(cases)
def test_the_order_in_which_live_workers_are_named_does_not_matter(
    case: tuple[int, list[list[int]], set[int]],
) -> None:
    num_workers, holders, live = case

    one = assign_holders(holders, num_workers, sorted(live))
    other = assign_holders([h[::-1] for h in holders], num_workers, sorted(live, reverse=True))

    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_replicas_spread_the_experts_evenly(num_workers: int) -> None:
    everywhere = [list(range(num_workers))] * 32

    serving = assign_holders(everywhere, num_workers)

    counts = np.bincount(serving, minlength=num_workers)
    assert counts.max() - counts.min() <= 1
