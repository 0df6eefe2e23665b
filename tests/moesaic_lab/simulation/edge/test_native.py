"""What advances fleets in C, against the reference: equal to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.native import advancer
from moesaic_lab.simulation.edge.reference import advance as reference
from moesaic_lab.simulation.edge.state import SIZE, EdgeState
from tests.moesaic_lab.simulation.edge.small import COSTS, FLEETS, ROUTING, drawn, planned

POLICIES = st.sampled_from(["uniform", "eplb", "dance", "optimal"])


def same(one: EdgeState, other: EdgeState) -> None:
    for name, value in vars(one).items():
        if name == "heap":
            events = [sorted(s.heap[: s.control[SIZE]].tolist()) for s in (one, other)]
            assert events[0] == events[1]
        else:
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)


@settings(deadline=None, max_examples=60)
@given(FLEETS, POLICIES, st.integers(0, 99), st.floats(0.0, 8.0))
def test_a_fleet_in_c_is_the_reference_to_the_last_bit(
    fleet: EdgeFleet, policy: str, seed: int, stop_s: float
) -> None:
    fast = advancer()
    if fast is None:
        pytest.skip("needs a C compiler")
    plan, workload = planned(fleet, policy), drawn(fleet, seed)
    mine, other = (EdgeState.of(fleet, COSTS, ROUTING, workload, plan.holder) for _ in range(2))

    for until_s in (stop_s, np.inf):
        fast(mine, until_s)
        reference(other, until_s)
        same(mine, other)
