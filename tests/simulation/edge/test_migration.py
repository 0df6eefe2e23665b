"""Placements that are decided anew while a simulated fleet serves."""

import numpy as np

from moesaic.simulation.edge.fleet import EdgeFleet
from moesaic.simulation.edge.migration import MigratingOutcome, ReplacingTerms, run_migrating
from moesaic.simulation.edge.placing import place
from moesaic.simulation.edge.workload import EdgeWorkload, demand_of, mixes_of
from tests.simulation.edge.small import COSTS, ROUTING

FLEET = EdgeFleet(gpus=(1, 1, 1), experts_per_gpu=14, mbit_per_s=20.0)
TASKS = mixes_of("specialised", 3, 3)
MOVED = [TASKS[1], TASKS[2], TASKS[0]]
SHIFT_S = 300.0


def served(interval_s: float, shifted: bool, expert_bytes: int = 1000) -> MigratingOutcome:
    plan = place("optimal", FLEET, demand_of(ROUTING, TASKS, 0.5, 3))
    workload = EdgeWorkload.poisson(ROUTING, TASKS, 0.5, SHIFT_S, answers=3).then(
        EdgeWorkload.poisson(
            ROUTING, MOVED if shifted else TASKS, 0.5, 2 * SHIFT_S, answers=3, start_s=SHIFT_S
        )
    )
    terms = ReplacingTerms("optimal", interval_s, expert_bytes)
    return run_migrating(FLEET, COSTS, ROUTING, workload, plan, terms, step_s=10.0)


def test_tasks_that_change_places_are_followed_by_one_migration() -> None:
    staying, migrating = served(np.inf, True), served(60.0, True)

    assert staying.decided_s == ()
    assert len(migrating.decided_s) == 1
    assert SHIFT_S < migrating.decided_s[0] < migrating.in_force_s[0] < 2 * SHIFT_S
    assert migrating.local_part[-10:].mean() > staying.local_part[-10:].mean() + 0.1
    assert migrating.outcome.mean_s < staying.outcome.mean_s


def test_nothing_moves_while_tasks_stay() -> None:
    assert served(60.0, False).decided_s == ()


def test_nothing_moves_where_moving_takes_longer_than_it_saves() -> None:
    assert served(60.0, True, expert_bytes=10**10).decided_s == ()
