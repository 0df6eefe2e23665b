"""The simulated fleet beside three real agents: what ``moesaic bench edge`` has measured."""

import json
from pathlib import Path

import pytest

from moesaic.placement.traffic.trace import Trace
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.native import advancer
from moesaic_lab.simulation.edge.placing import place
from moesaic_lab.simulation.edge.reference import advance
from moesaic_lab.simulation.edge.routing import TaskRouting
from moesaic_lab.simulation.edge.study import run
from moesaic_lab.simulation.edge.workload import EdgeWorkload, demand_of
from tests.moesaic_lab.simulation.edge.small import COSTS

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
POLICIES = "uniform", "redundance", "smartmoe", "eplb", "dance", "optimal"


@pytest.mark.parametrize("setting", ["specialised", "mixed"])
def test_as_large_a_part_of_choices_is_remote_as_was_measured(setting: str) -> None:
    measured = json.loads((BENCHMARKS / "results/edge.json").read_text())
    trace = Trace.decode((BENCHMARKS / "data/demo.moetrace").read_bytes())
    routing = TaskRouting.of_trace(trace, mean_prompt=40)
    tasks = [routing.tasks.index(task) for task in measured["config"]["tasks"]]
    mixes = [(task,) for task in tasks] if setting == "specialised" else [tuple(tasks)] * 3
    demand = demand_of(routing, mixes, 1.0, 15)
    fleet = EdgeFleet(gpus=(1, 1, 2), experts_per_gpu=77, mbit_per_s=500.0)
    workload = EdgeWorkload.poisson(routing, mixes, 1.1, 120.0, answers=15, seed=1)

    for policy in POLICIES:
        plan = place(policy, fleet, demand)
        outcome = run(fleet, COSTS, routing, workload, plan.holder, advancer() or advance)

        assert outcome.remote_part == pytest.approx(plan.remote_part(demand), abs=0.04)
        found = measured["figures"][setting][policy]["remote_share"]
        assert outcome.remote_part == pytest.approx(found, abs=0.09), policy
