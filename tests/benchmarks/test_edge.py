"""Arrivals, tasks, figures and pictures of the edge benchmark, from made-up traffic."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest

from benchmarks.common.placements import placed_worker
from benchmarks.edge.arrivals import EdgeArrival, TaskStretch, arrivals, poisson
from benchmarks.edge.counts import CountsSample, SiteCounts, local_share_series, messages_of
from benchmarks.edge.figures import compared, over_rounds, stretch_figures
from benchmarks.edge.load import EdgeAnswer
from benchmarks.edge.picture import draw
from benchmarks.edge.point import EdgePoint
from benchmarks.edge.stretch import EdgeStretch
from benchmarks.edge.swap import EdgeMigration, SwapArm, in_force, local_back, swap_figures, swapped
from benchmarks.edge.table import tasks_of_sites, with_predictions
from benchmarks.edge.tasks import (
    TaskPrompts,
    distance,
    most_different,
    routing_parts,
    tasks_with_prompts,
)
from moesaic.cli.load.generator import TimedRequest
from moesaic.messages.placement import Placement
from moesaic.placement.traffic.trace import Trace, TracedStep

OWN = (("a",), ("b",), ("c",))


def answer(site: int, due_s: float, latency_s: float, complete: bool = True) -> EdgeAnswer:
    request = TimedRequest(0, due_s, end_s=due_s + latency_s, complete=complete)
    return EdgeAnswer(EdgeArrival(0, site, "a", due_s), request)


def sample(at_s: float, *local_and_remote: tuple[float, float]) -> CountsSample:
    return CountsSample(at_s, tuple(SiteCounts(local=n, remote=m) for n, m in local_and_remote))


def stretch(answers: Sequence[EdgeAnswer], samples: Sequence[CountsSample]) -> EdgeStretch:
    return EdgeStretch(1000.0, list(answers), list(samples))


def placement(*by_layer: list[list[int]]) -> Placement:
    workers = [placed_worker(f"agent-{n}", "a:2", admin_address="a:1") for n in range(2)]
    return Placement(
        epoch=1,
        model_digest="m",
        workers=workers,
        layers=list(range(len(by_layer))),
        num_experts=2,
        slots=list(by_layer),
    )


def test_gaps_of_arrivals_are_exponential() -> None:
    times = poisson(4.0, 5000.0, "seed")
    gaps = [after - before for before, after in pairwise(times)]

    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(1.0, abs=0.03)
    assert times == sorted(times)


def test_every_policy_meets_the_same_arrivals() -> None:
    stretches = [TaskStretch(60.0, OWN)]

    assert arrivals(stretches, 1.0, "1") == arrivals(stretches, 1.0, "1")
    assert arrivals(stretches, 1.0, "1") != arrivals(stretches, 1.0, "2")


def test_tasks_change_places_where_the_next_stretch_begins() -> None:
    due = arrivals([TaskStretch(50.0, OWN), TaskStretch(50.0, swapped(OWN))], 1.0, "1")

    before = {(each.site, each.task) for each in due if each.due_s < 50}
    after = {(each.site, each.task) for each in due if each.due_s >= 50}
    assert before == {(0, "a"), (1, "b"), (2, "c")}
    assert after == {(0, "b"), (1, "a"), (2, "c")}
    assert [each.due_s for each in due] == sorted(each.due_s for each in due)


def test_no_prompt_of_a_task_is_asked_twice_while_there_are_others() -> None:
    due = arrivals([TaskStretch(100.0, tasks_of_sites("mixed", ("a", "b")))], 1.0, "1")

    for task in ("a", "b"):
        numbers = [each.number for each in due if each.task == task]
        assert numbers == list(range(len(numbers)))
    assert {each.site for each in due if each.task == "a"} == {0, 1}


def test_routing_is_as_far_apart_as_the_rows_that_differ() -> None:
    steps = [[[[0], [0]]], [[[1], [1]]], [[[0], [1]]]]  # of each part one step, [L, T, k]
    traced = tuple(TracedStep(n, 0, np.array(ids, np.uint8)) for n, ids in enumerate(steps))
    trace = Trace("m", 2, 1, (0,), ("left", "right", "both"), traced)

    parts = routing_parts(trace)

    assert distance(parts["left"], parts["right"]) == 1.0
    assert distance(parts["left"], parts["both"]) == 0.5
    assert most_different(parts, 2) == (("left", "right"), 1.0)


def test_the_chosen_tasks_are_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(3)
    routing = {f"task-{n}": rng.dirichlet(np.ones(6), size=2) for n in range(6)}

    chosen, least = most_different(routing, 3)

    every = {
        tasks: min(distance(routing[a], routing[b]) for a, b in combinations(tasks, 2))
        for tasks in combinations(routing, 3)
    }
    assert every[chosen] == least == max(every.values())


def test_prompts_to_measure_were_not_learned_from() -> None:
    task = sorted(tasks_with_prompts())[0]
    prompts = TaskPrompts([task])

    learned = {prompts.to_learn(task, number) for number in range(100)}
    measured = {prompts.to_measure(task, number) for number in range(100)}

    assert learned
    assert measured
    assert not learned & measured


def test_figures_of_a_stretch_are_what_happened_in_it() -> None:
    answers = [
        answer(0, 0.0, 1.0),
        answer(0, 1.0, 3.0),
        answer(1, 0.0, 2.0),
        answer(1, 1, 9, False),
    ]
    samples = [sample(0.0, (100, 50), (0, 0)), sample(9.0, (160, 70), (20, 20))]

    figures = stretch_figures(stretch(answers, samples), choices_per_token=4)

    assert (figures["requests"], figures["failed_requests"]) == (4, 1)
    assert figures["mean_latency_s"] == figures["latency_p50_s"] == 2.0
    assert figures["mean_latency_s_by_server"] == [2.0, 2.0]
    assert figures["local_share_by_server"] == [0.75, 0.5]
    assert figures["local_share"] == pytest.approx(80 / 120, abs=1e-4)
    assert figures["remote_calls_per_token"] == pytest.approx(40 / 30, abs=1e-3)


def test_a_server_without_requests_has_no_latency() -> None:
    samples = [sample(0.0, (0, 0), (0, 0)), sample(1.0, (1, 0), (0, 0))]

    figures = stretch_figures(stretch([answer(0, 0.0, 1.0)], samples), choices_per_token=4)

    assert figures["mean_latency_s_by_server"] == [1.0, None]
    assert figures["local_share_by_server"] == [1.0, None]


def policy_figures(mean_latency_s: float, remote_calls: int) -> dict[str, Any]:
    return {
        "mean_latency_s": mean_latency_s,
        "mean_latency_s_by_server": [mean_latency_s, None],
        "local_share": 0.5,
        "remote_calls": remote_calls,
    }


def test_rounds_are_joined_with_their_spread() -> None:
    joined = over_rounds([policy_figures(1.0, 10), policy_figures(2.0, 20)])

    assert joined["mean_latency_s"] == 1.5
    assert joined["mean_latency_s_of_rounds"] == [1.0, 2.0]
    assert joined["mean_latency_s_by_server"] == [1.5, None]
    assert joined["remote_calls"] == 30


def test_policies_stand_beside_eplb_and_the_optimum() -> None:
    told = compared({"eplb": policy_figures(2.0, 30), "optimal": policy_figures(1.0, 20)})

    assert told["optimal"]["ratio_vs_eplb"] == 0.5
    assert told["eplb"]["remote_calls_over_optimum"] == 1.5


def test_remote_calls_are_predicted_by_the_demand() -> None:
    plans = {"eplb": placement([[0], [1]]), "optimal": placement([[0, 1], [1]])}
    demand = np.array([[[6.0, 2.0]], [[0.0, 2.0]]])  # of two servers in one layer
    measured = {policy: policy_figures(1.0, 1) for policy in plans}

    told = with_predictions(measured, plans, demand)

    assert told["eplb"]["predicted_remote_share"] == 0.2
    assert told["optimal"]["predicted_remote_share"] == 0.0
    assert told["eplb"]["predicted_over_optimum"] is None  # of an optimum without calls


def test_local_shares_over_time_are_of_what_came_in_each_step() -> None:
    samples = [sample(float(n), (10.0 * n, 0.0), (0.0, 10.0 * n)) for n in range(5)]
    samples.append(sample(6.0, (40.0, 0.0), (0.0, 40.0)))

    assert local_share_series(samples, 2.0) == [
        [0.5, 0.5, None],
        [1.0, 1.0, None],
        [0.0, 0.0, None],
    ]


def test_messages_to_all_peers_count() -> None:
    name = "moesaic_site_remote_calls_total"

    assert messages_of({f'{name}{{peer="a"}}': 2, f'{name}{{peer="b"}}': 3, "other": 9}) == 5


def shares(*by_step: float) -> list[CountsSample]:
    """Samples every five seconds, whose steps have these local shares."""
    totals = np.cumsum([[0, 0], *([100 * s, 100 * (1 - s)] for s in by_step)], axis=0)
    return [sample(5.0 * n, (local, remote)) for n, (local, remote) in enumerate(totals.tolist())]


@pytest.mark.parametrize(
    ("after", "back_s"),
    [((0.4, 0.4, 0.8, 0.8), 10.0), ((0.8, 0.8), 0.0), ((0.4, 0.8, 0.4), None)],
)
def test_local_shares_are_back_once_they_stay(after: tuple[float, ...], back_s: float) -> None:
    assert local_back(shares(0.8, 0.8, 0.8, *after), 15.0) == back_s


def test_a_migration_counts_once_it_is_in_force() -> None:
    migrations = [
        EdgeMigration(50.0, 5.0, 9),
        EdgeMigration(120.0, None, 9),
        EdgeMigration(130.0, 20.0, 9),
    ]

    assert in_force(migrations, 100.0) == 150.0
    assert in_force(migrations[:2], 100.0) is None


def test_the_arms_are_compared_from_when_the_migration_was_in_force() -> None:
    point = EdgePoint(steady_s=10.0)
    samples = shares(0.8, 0.8, 0.4, 0.8)
    times = (0.0, 11.0, 15.0, 16.0)
    moving = stretch([answer(0, at, 1.0 if at < 12 else 0.5) for at in times], samples)
    still = stretch([answer(0, at, 1.0) for at in times], samples)
    migrations = [EdgeMigration(12.0, 3.0, 9)]

    told = swap_figures(
        {"migrating": SwapArm(moving, migrations), "staying": SwapArm(still, [])}, point
    )

    assert (told["migrations"], told["migrations_before"]) == (1, 0)
    assert told["in_force_s"] == 5.0
    assert told["latency_ratio_vs_staying"] == 0.5
    assert told["latency_ratio_before"] == 1.0
    assert told["migrating"]["failed_requests"] == 0


@pytest.mark.parametrize("with_swap", [False, True])
def test_a_picture_is_drawn(tmp_path: Path, with_swap: bool) -> None:
    own = {"mean_latency_s": 1.0, "mean_latency_s_of_rounds": [0.5, 1.5]}
    figures = {"specialised": {"eplb": own, "optimal": own}, "mixed": {"eplb": own, "optimal": own}}
    arm = {"start_s": 0.0, "step_s": 5.0, "local_share": [[0.5, None, 0.7]]}
    swap = {"swap": {"migrating": arm, "staying": arm, "shift_s": 5.0}} if with_swap else {}

    draw({"figures": figures, "series": swap}, tmp_path / "edge.png")

    assert (tmp_path / "edge.png").stat().st_size > 1000
