"""Tasks that change places: with migrations and without, under the same arrivals."""

from dataclasses import dataclass
from typing import Any

from benchmarks.edge.arrivals import TaskStretch
from benchmarks.edge.counts import CountsSample, local_share_series
from benchmarks.edge.figures import OPTIMUM, between, mean_latency, ratio
from benchmarks.edge.point import EdgePoint
from benchmarks.edge.session import EdgeSession, SiteTasks
from benchmarks.edge.stretch import EdgeStretch
from moesaic.cli.terminal.console import say

ARMS = {"migrating": "auto", "staying": "keep"}  # and their policies
STEP_S = 5.0
BACK = 0.9  # of the local share before


@dataclass(frozen=True)
class EdgeMigration:
    """A migration that the scheduler decided on because of the traffic; times are those of the stretch.

    Attributes:
        at_s: when it was decided.
        seconds: until it was in force; None if it is not.
        moves: experts that were loaded.
    """

    at_s: float
    seconds: float | None
    moves: int


@dataclass(frozen=True)
class SwapArm:
    """Outcome of one arm."""

    stretch: EdgeStretch
    migrations: list[EdgeMigration]


def swapped(tasks: SiteTasks) -> SiteTasks:
    """Let the tasks of the first two servers change places."""
    return (tasks[1], tasks[0], *tasks[2:])


async def swap_arm(session: EdgeSession, tasks: SiteTasks, arm: str) -> SwapArm:
    """Place for the tasks as they are, then send traffic in which they change places."""
    point, control = session.point, session.control
    plans, _ = await session.learn(tasks, point.swap_rate_per_s, [OPTIMUM])
    await control.apply(plans[OPTIMUM])
    await control.set_policy(ARMS[arm])
    start_s = 0.0 if arm == "migrating" else point.steady_s - point.lead_s
    say(f"{arm}: tasks change places in {point.steady_s - start_s:.0f} s")
    stretches = [
        TaskStretch(point.steady_s, tasks),
        TaskStretch(point.shifted_s, swapped(tasks)),
    ]
    stretch = await session.measure(stretches, point.swap_rate_per_s, 0, arm, start_s)
    migrations = [
        EdgeMigration(
            round(each.at - stretch.began_at, 1), each.seconds if each.epoch else None, each.moves
        )
        for each in await control.migrations(stretch.began_at)
    ]
    say(f"{arm}: mean latency {mean_latency(stretch.answers)} s, migrations {migrations}")
    return SwapArm(stretch, migrations)


def swap_figures(arms: dict[str, SwapArm], point: EdgePoint) -> dict[str, Any]:
    """Gather the figures of both arms; seconds count from when the tasks changed places."""
    shift_s, lead_s = point.steady_s, point.steady_s - point.lead_s
    migrating, staying = arms["migrating"], arms["staying"]
    after = [each for each in migrating.migrations if each.at_s >= shift_s]
    in_force_s = in_force(migrating.migrations, shift_s)
    figures: dict[str, Any] = {
        "migrations_before": len(migrating.migrations) - len(after),
        "migrations": len(after),
        "decided_s": [round(each.at_s - shift_s, 1) for each in after],
        "moves": [each.moves for each in after],
        "in_force_s": None if in_force_s is None else round(in_force_s - shift_s, 1),
        "latency_ratio_vs_staying": None,
        "latency_ratio_all_shifted": _ratio(migrating, staying, shift_s),
        "latency_ratio_before": _ratio(migrating, staying, lead_s, shift_s),
    }
    if in_force_s is not None:
        figures["latency_ratio_vs_staying"] = _ratio(migrating, staying, in_force_s)
    for name, arm in arms.items():
        answers = arm.stretch.answers
        figures[name] = {
            "requests": len(answers),
            "failed_requests": sum(not each.request.complete for each in answers),
            "mean_latency_s_before": mean_latency(between(answers, lead_s, shift_s)),
            "mean_latency_s_shifted": mean_latency(between(answers, shift_s, float("inf"))),
            "local_back_s": local_back(arm.stretch.samples, shift_s),
        }
    return figures


def in_force(migrations: list[EdgeMigration], shift_s: float) -> float | None:
    """Find when the first migration after the shift was in force; None if none was."""
    ends = [m.at_s + m.seconds for m in migrations if m.at_s >= shift_s and m.seconds is not None]
    return min(ends, default=None)


def local_back(samples: list[CountsSample], shift_s: float) -> float | None:
    """Find the seconds from the shift until local shares are back, at 90 % of what they were, to stay.

    Returns:
        None if they are not in the last step.
    """
    before = [sample for sample in samples if sample.at_s < shift_s]
    after = [sample for sample in samples if sample.at_s >= shift_s]
    shares = local_share_series(after, STEP_S)[0]
    usual = local_share_series([before[0], before[-1]], 0.0)[0][0]
    if usual is None or not shares:
        return None
    low = [n for n, share in enumerate(shares) if share is not None and share < BACK * usual]
    if not low:
        return 0.0
    return None if low[-1] == len(shares) - 1 else STEP_S * (low[-1] + 1)


def _ratio(
    arm: SwapArm, base: SwapArm, start_s: float, end_s: float = float("inf")
) -> float | None:
    own, other = (between(each.stretch.answers, start_s, end_s) for each in (arm, base))
    return ratio(mean_latency(own), mean_latency(other))
