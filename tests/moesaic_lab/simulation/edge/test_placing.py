"""Placements of simulated fleets, and who computes whose rows."""

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.common.remote_calls import remote_calls
from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.placing import MOST_SITES, holders_of, place
from moesaic_lab.simulation.edge.study import run
from moesaic_lab.simulation.edge.workload import EdgeWorkload, demand_of, mixes_of
from tests.moesaic_lab.simulation.edge.small import COSTS, FLEETS, ROUTING, planned

POLICIES = "uniform", "redundance", "smartmoe", "eplb", "dance", "optimal"


@settings(deadline=None, max_examples=20)
@given(FLEETS)
def test_rows_go_to_sites_that_hold_their_experts_and_stay_at_home_where_they_can(
    fleet: EdgeFleet,
) -> None:
    for policy in POLICIES:
        plan = planned(fleet, policy)
        site, layer, expert = np.indices(plan.held.shape)

        assert plan.held[plan.holder, layer, expert].all()
        assert (plan.holder == site)[plan.held].all()


def test_a_site_asks_the_nearest_of_those_that_hold_most_of_what_it_lacks() -> None:
    held = np.array([[[1, 0, 0, 0]], [[0, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 0, 1, 1]]], bool)
    demand = np.array([[[0.1, 0.3, 0.5, 0.1]]] * 4)

    assert holders_of(held, demand)[0, 0].tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_remote_choices_are_those_that_the_objective_of_placement_counts(policy: str) -> None:
    fleet = EdgeFleet.of_paper(4, 10, 100.0)
    mixes = mixes_of("specialised", fleet.num_sites, 3)
    demand = demand_of(ROUTING, mixes, 1.0, 8)
    plan = place(policy, fleet, demand)
    workload = EdgeWorkload.poisson(ROUTING, mixes, 1.0, 100.0, answers=8, seed=3)

    outcome = run(fleet, COSTS, ROUTING, workload, plan.holder)

    slots = [
        [np.flatnonzero(site[layer]).tolist() for site in plan.held]
        for layer in range(ROUTING.num_layers)
    ]
    expected = remote_calls(slots, demand) / demand.sum()
    assert plan.remote_part(demand) == pytest.approx(expected)
    # What is served was drawn as what is learned from was, but is not the same.
    assert outcome.remote_part == pytest.approx(expected, abs=0.05)


def test_too_many_sites_for_a_policy_are_placed_in_regions() -> None:
    fleet = EdgeFleet(gpus=(1,) * (MOST_SITES["eplb"] + 1), experts_per_gpu=9, mbit_per_s=100.0)
    demand = demand_of(ROUTING, mixes_of("mixed", fleet.num_sites, 3), 1.0, 3)

    plan = place("eplb", fleet, demand)

    assert plan.num_regions == 5
    assert plan.held.sum(axis=(1, 2)).tolist() == [9] * fleet.num_sites
    assert abs(plan.holder - np.arange(fleet.num_sites)[:, None, None]).max() < 48


def test_memory_that_cannot_hold_every_expert_is_refused() -> None:
    fleet = EdgeFleet.of_paper(4, 5, 100.0)

    with pytest.raises(PlacementInfeasible):
        place("optimal", fleet, np.ones((3, ROUTING.num_layers, ROUTING.num_experts)))


@pytest.mark.parametrize(("gpus", "sites"), [(1, (1,)), (4, (1, 1, 2)), (7, (1, 1, 2, 1, 1, 1))])
def test_fleets_repeat_the_servers_of_the_paper(gpus: int, sites: tuple[int, ...]) -> None:
    assert EdgeFleet.of_paper(gpus, 9, 100.0).gpus == sites


@pytest.mark.parametrize(
    ("field", "wrong"), [("gpus", {"gpus": ()}), ("mbit_per_s", {"mbit_per_s": 0.0})]
)
def test_fleets_that_cannot_be_are_refused(field: str, wrong: dict[str, object]) -> None:
    known = {"gpus": (1,), "experts_per_gpu": 1, "mbit_per_s": 1.0}

    with pytest.raises(InvalidInput, match=field):
        EdgeFleet(**{**known, **wrong})  # type: ignore[arg-type]
