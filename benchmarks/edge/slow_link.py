"""Slow links: the optimal placement with a tenth of the rate, exact and with choices left to fewer experts."""

from typing import Any

from benchmarks.common.suite import RunningSuite
from benchmarks.edge.arrivals import TaskStretch
from benchmarks.edge.figures import stretch_figures
from benchmarks.edge.session import EdgeSession, SiteTasks
from moesaic.cli.machine.links.link import read_link
from moesaic.cli.terminal.console import say
from moesaic.messages.placement import Placement


async def measure_thresholds(
    session: EdgeSession,
    suite: RunningSuite,
    tasks: SiteTasks,
    placement: Placement,
    choices_per_token: int,
) -> dict[str, Any]:
    """Measure every threshold of brownout on slow links, and leave links and thresholds as they were.

    Returns:
        Figures by threshold; the first is also measured at the usual rate, as ``usual link``.
    """
    point, figures = session.point, dict[str, Any]()
    rates = [("usual link", read_link(point.link).rate_bit, point.thresholds[0])]
    rates += [(f"{each:g}", point.slow_bit_per_s, each) for each in point.thresholds]
    await session.control.apply(placement)
    stretches = [TaskStretch(point.measure_s, tasks)]
    for name, bit_per_s, threshold in rates:
        suite.set_link_rate(bit_per_s)
        await session.control.degrade(threshold)
        salt = f"slow {name}"
        stretch = await session.measure(stretches, point.rate_per_s, 0, salt)
        figures[name] = own = stretch_figures(stretch, choices_per_token)
        say(
            f"{bit_per_s / 1e6:.0f} Mbit/s, threshold {threshold:g}: mean latency "
            f"{own['mean_latency_s']} s, degraded {own['degraded_share']}"
        )
    suite.set_link_rate(read_link(point.link).rate_bit)
    await session.control.degrade(1.0)
    return figures
