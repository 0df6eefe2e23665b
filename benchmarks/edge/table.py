"""Table II: every policy's placement for the same traffic, under the same arrivals, in turns."""

from collections.abc import Mapping
from typing import Any

from benchmarks.common.remote_calls import remote_calls
from benchmarks.edge.arrivals import TaskStretch
from benchmarks.edge.counts import local_share_series
from benchmarks.edge.figures import OPTIMUM, compared, over_rounds, ratio, stretch_figures
from benchmarks.edge.session import EdgeSession, SiteTasks
from moesaic.cli.machine.facts import gemm_gflops
from moesaic.cli.terminal.console import say
from moesaic.messages.placement import Placement
from moesaic.placement.traffic.statistics import Floats

STEP_S = 2.0


def tasks_of_sites(setting: str, tasks: tuple[str, ...]) -> SiteTasks:
    """Give each server a task of its own (``specialised``), or all of them to every one (``mixed``)."""
    return tuple((task,) for task in tasks) if setting == "specialised" else (tasks,) * len(tasks)


async def compare_policies(
    session: EdgeSession, setting: str, tasks: SiteTasks, choices_per_token: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Placement]]:
    """Measure all policies in turns, in every second round in reverse order.

    Returns:
        Figures by policy; local shares over time by policy, of the first round; the placements.
    """
    point, control = session.point, session.control
    plans, demand = await session.learn(tasks, point.rate_per_s, point.policies)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in plans}
    series: dict[str, Any] = {}
    stretches = [TaskStretch(point.measure_s, tasks)]
    for number in range(point.rounds):
        for policy in list(plans) if number % 2 == 0 else reversed(plans):
            migrated_s, probe = await control.apply(plans[policy]), gemm_gflops()
            salt = f"{setting} {policy} {number}"
            stretch = await session.measure(stretches, point.rate_per_s, number, salt)
            own = stretch_figures(stretch, choices_per_token)
            found[policy].append({**own, "migrated_s": migrated_s, "gemm_gflops": probe})
            shares = local_share_series(stretch.samples, STEP_S)
            series.setdefault(policy, {"step_s": STEP_S, "local_share": shares[0]})
            say(
                f"{setting}, round {number + 1}, {policy}: mean latency {own['mean_latency_s']} s, "
                f"local {own['local_share']}, placed in {migrated_s:.1f} s"
            )
    joined = {policy: over_rounds(rounds) for policy, rounds in found.items()}
    return with_predictions(compared(joined), plans, demand), series, plans


def with_predictions(
    by_policy: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Placement], demand: Floats
) -> dict[str, dict[str, Any]]:
    """Add to figures what each placement should do to remote calls, by the demand it was planned from."""
    remote = {policy: remote_calls(plan.slots, demand) for policy, plan in plans.items()}
    return {
        policy: {
            **own,
            "remote_share": round(1 - own["local_share"], 4),
            "predicted_remote_share": round(remote[policy] / float(demand.sum()), 4),
            "predicted_over_optimum": ratio(remote[policy], remote[OPTIMUM]),
        }
        for policy, own in by_policy.items()
    }
