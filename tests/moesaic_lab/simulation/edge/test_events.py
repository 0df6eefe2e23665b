"""The reference of a simulated fleet of edge servers, against what must hold and closed forms."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.reference import advance
from moesaic_lab.simulation.edge.routing import ANSWERS
from moesaic_lab.simulation.edge.state import SIZE, EdgeState
from moesaic_lab.simulation.edge.study import run
from moesaic_lab.simulation.edge.workload import EdgeWorkload
from tests.moesaic_lab.simulation.edge.small import (
    COSTS,
    FLEETS,
    ROUTING,
    drawn,
    everything_at_home,
    planned,
)

ALONE = EdgeFleet(gpus=(1,), experts_per_gpu=36, mbit_per_s=10.0)
PAIR = EdgeFleet(gpus=(1, 1), experts_per_gpu=36, mbit_per_s=10.0)


def one_request(workload: EdgeWorkload, site: int = 0) -> EdgeWorkload:
    first = np.flatnonzero(workload.site == site)[:1]
    names = "at_s", "site", "prompt", "answers", "pool", "start"
    return EdgeWorkload(*(getattr(workload, name)[first] for name in names))


def demand_of_passes(fleet: EdgeFleet, workload: EdgeWorkload) -> NDArray[np.int64]:
    """Count the choices of every request's passes by its site, int64 ``[N, L, E]``."""
    demand = np.zeros((fleet.num_sites, ROUTING.num_layers, ROUTING.num_experts), np.int64)
    for at in range(len(workload)):
        nth = workload.start[at] + np.arange(workload.answers[at])
        for one in (workload.prompt[at], *(workload.pool[at] + nth % (ANSWERS // 2))):
            for layer in range(ROUTING.num_layers):
                first, end = ROUTING.offsets[one * ROUTING.num_layers + layer :][:2]
                chosen = ROUTING.experts[first:end]
                np.add.at(demand[workload.site[at], layer], chosen, ROUTING.rows[first:end])
    return demand


def prompts_alone(workload: EdgeWorkload, prompt: int) -> EdgeWorkload:
    """Make all requests one and the same prompt, without answers behind it."""
    return replace(
        workload,
        prompt=np.full_like(workload.prompt, prompt),
        answers=np.zeros_like(workload.answers),
    )


@settings(deadline=None, max_examples=25)
@given(FLEETS, st.integers(0, 5))
def test_every_request_is_answered_and_every_choice_is_served_once(
    fleet: EdgeFleet, seed: int
) -> None:
    plan, workload = planned(fleet), drawn(fleet, seed)
    state = EdgeState.of(fleet, COSTS, ROUTING, workload, plan.holder)

    advance(state, np.inf)

    rows = ROUTING.tokens[workload.prompt] + workload.answers
    choices = int(rows.sum()) * ROUTING.num_layers * ROUTING.top_k
    assert np.isfinite(state.end_s).all()
    assert (state.at_s <= state.begun_s).all()
    assert (state.begun_s < state.first_s).all()
    assert (state.first_s < state.end_s).all()
    demand = demand_of_passes(fleet, workload)
    assert state.local.sum() + state.remote.sum() == demand.sum() == choices
    assert state.remote.sum() == demand[~plan.held].sum()
    assert state.control[SIZE] == 0


@settings(deadline=None, max_examples=10)
@given(FLEETS, st.integers(0, 5))
def test_one_seed_gives_one_outcome(fleet: EdgeFleet, seed: int) -> None:
    plan = planned(fleet)
    outcomes = [run(fleet, COSTS, ROUTING, drawn(fleet, seed), plan.holder) for _ in range(2)]

    assert repr(outcomes[0]) == repr(outcomes[1])


@settings(deadline=None, max_examples=10)
@given(FLEETS, st.integers(0, 3), st.floats(0.1, 6.0))
def test_a_fleet_may_be_advanced_in_stretches(fleet: EdgeFleet, seed: int, stop_s: float) -> None:
    plan, workload = planned(fleet), drawn(fleet, seed)
    whole, parts = (EdgeState.of(fleet, COSTS, ROUTING, workload, plan.holder) for _ in range(2))

    advance(whole, np.inf)
    advance(parts, stop_s)
    assert not (parts.first_s >= stop_s).any()
    advance(parts, np.inf)

    np.testing.assert_array_equal(whole.end_s, parts.end_s)
    assert whole.num_events == parts.num_events


@pytest.mark.parametrize("mbit_per_s", [0.1, 10.0])
def test_nothing_is_sent_where_every_expert_is_at_home(mbit_per_s: float) -> None:
    fleet = replace(PAIR, mbit_per_s=mbit_per_s)

    outcome = run(fleet, COSTS, ROUTING, drawn(fleet, 0), everything_at_home(fleet))

    assert outcome.remote_part == outcome.messages_per_token == outcome.link_part == 0


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 20), st.sampled_from(["uniform", "dance", "optimal"]))
def test_a_request_alone_is_never_later_over_faster_links(seed: int, policy: str) -> None:
    plan = planned(PAIR, policy, experts=20)
    workload = one_request(drawn(PAIR, seed))
    latencies = [
        run(replace(PAIR, mbit_per_s=rate), COSTS, ROUTING, workload, plan.holder).mean_s
        for rate in (1.0, 3.0, 10.0, 100.0)
    ]

    assert latencies == sorted(latencies, reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_requests_are_sooner_answered_over_faster_links(seed: int) -> None:
    plan = planned(PAIR, experts=20)
    latencies = [
        run(replace(PAIR, mbit_per_s=rate), COSTS, ROUTING, drawn(PAIR, seed), plan.holder).mean_s
        for rate in (1.0, 10.0, 100.0)
    ]

    assert latencies == sorted(latencies, reverse=True)


def test_a_request_whose_experts_are_all_elsewhere_takes_the_sum_of_its_parts() -> None:
    workload = prompts_alone(one_request(drawn(PAIR, 0)), ROUTING.first_answer(0))
    holder = np.ones((2, ROUTING.num_layers, ROUTING.num_experts), np.int32)

    outcome = run(PAIR, COSTS, ROUTING, workload, holder)

    attention_s = COSTS.layer_s + COSTS.row_s + COSTS.key_s
    way_s = COSTS.message_s + COSTS.row_bytes * PAIR.byte_s + COSTS.hop_s
    experts_s = COSTS.experts_s + ROUTING.top_k * (COSTS.expert_s + COSTS.choice_s)
    layer_s = attention_s + 2 * way_s + experts_s
    assert outcome.mean_s == pytest.approx(ROUTING.num_layers * layer_s)
    assert outcome.remote_part == 1
    assert outcome.messages_per_token == ROUTING.num_layers


def test_one_site_is_a_queue_with_poisson_arrivals_and_one_service_time() -> None:
    prompt = ROUTING.first_prompt(0)
    holder = everything_at_home(ALONE)
    first = prompts_alone(one_request(drawn(ALONE, 0)), prompt)
    service_s = run(ALONE, COSTS, ROUTING, first, holder).mean_s
    workload = prompts_alone(drawn(ALONE, 1, 2 * service_s, 40_000 * service_s), prompt)

    state = EdgeState.of(ALONE, COSTS, ROUTING, workload, holder)
    advance(state, np.inf)

    free_s = 0.0
    for at_s, begun_s in zip(state.at_s.tolist(), state.begun_s.tolist(), strict=True):
        assert begun_s == pytest.approx(max(at_s, free_s))  # Lindley
        free_s = begun_s + service_s
    load = 0.5
    mean_wait_s = load * service_s / (2 * (1 - load))  # M/D/1, Pollaczek and Khinchine
    assert (state.begun_s - state.at_s).mean() == pytest.approx(mean_wait_s, rel=0.04)
