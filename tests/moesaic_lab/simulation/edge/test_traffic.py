"""Routing, workloads and costs of simulated edge servers."""

import numpy as np
import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.performance import PerformanceModel
from moesaic.placement.traffic.trace import Trace, TracedStep
from moesaic_lab.simulation.edge.costs import EdgeCosts
from moesaic_lab.simulation.edge.profiles import PROFILES, costs_of
from moesaic_lab.simulation.edge.routing import TaskRouting
from moesaic_lab.simulation.edge.workload import EdgeWorkload, demand_of, mixes_of
from tests.moesaic_lab.simulation.edge.small import ROUTING


def a_trace() -> Trace:
    """Two layers of 4 experts: task ``a`` has experts 0 and 1 in prompts, then 2 and 3; ``b`` no prompts."""
    prompts = np.zeros((2, 40, 2), np.uint8)
    prompts[:, :, 1] = 1
    prompts[:, 20:] += 2
    answers = np.full((2, 6, 2), 1, np.uint8)
    answers[:, :, 1] = 3
    steps = [TracedStep(0, 0, prompts), TracedStep(0, 6, answers), TracedStep(1, 6, answers)]
    return Trace("digest", 4, 2, (0, 1), ("a", "b"), tuple(steps))


def test_prompts_to_learn_from_and_prompts_to_serve_are_other_rows_of_a_trace() -> None:
    routing = TaskRouting.of_trace(a_trace(), mean_prompt=10)
    served = routing.first_prompt(0)
    entries = slice(routing.offsets[served * 2], routing.offsets[served * 2 + 1])

    assert routing.tasks == ("a",)
    assert routing.experts[entries].tolist() == [2, 3]
    assert routing.rows[entries].tolist() == [routing.tokens[served]] * 2
    assert (routing.learned(0, 0)[:, 2:] == 0).all()
    assert routing.learned(0, 10)[0, 3] == 10


def test_a_trace_without_whole_requests_is_refused() -> None:
    trace = a_trace()

    with pytest.raises(InvalidInput, match="prompts and answers"):
        TaskRouting.of_trace(Trace("d", 4, 2, (0, 1), ("a", "b"), trace.steps[2:]), 10)


def test_rows_choose_distinct_experts_and_tasks_differ() -> None:
    per_place = np.add.reduceat(ROUTING.rows, ROUTING.offsets[:-1]).reshape(-1, ROUTING.num_layers)

    assert (per_place == ROUTING.tokens[:, None] * ROUTING.top_k).all()
    assert (
        ROUTING.rows
        <= np.repeat(ROUTING.tokens, ROUTING.num_layers).repeat(np.diff(ROUTING.offsets))
    ).all()
    assert np.abs(ROUTING.learned(0, 3) - ROUTING.learned(1, 3)).max() > 1


def test_arrivals_have_the_gaps_that_were_asked_for() -> None:
    mixes = mixes_of("mixed", 4, 3)
    workload = EdgeWorkload.poisson(ROUTING, mixes, 2.0, 10_000.0, answers=3, seed=1)
    gaps = np.diff(workload.at_s[workload.site == 2])

    assert (np.diff(workload.at_s) >= 0).all()
    assert gaps.mean() == pytest.approx(2.0, rel=0.05)
    assert gaps.std() == pytest.approx(2.0, rel=0.05)


def test_specialised_sites_have_one_task_and_mixed_ones_all() -> None:
    assert mixes_of("specialised", 4, 3) == [(0,), (1,), (2,), (0,)]
    assert mixes_of("mixed", 2, 3) == [(0, 1, 2)] * 2


def test_demand_is_choices_a_second() -> None:
    demand = demand_of(ROUTING, mixes_of("specialised", 3, 3), 2.0, 3)

    np.testing.assert_allclose(demand[1], ROUTING.learned(1, 3) / 2)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_profiles_have_every_part_and_say_where_they_are_from(name: str) -> None:
    costs = costs_of(PROFILES[name])

    assert PROFILES[name].source
    assert min(costs.layer_s, costs.experts_s, costs.expert_s, costs.hop_s) > 0


def test_costs_without_a_part_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"link\.inter"):
        EdgeCosts.of(PerformanceModel(), 26, 4096)
