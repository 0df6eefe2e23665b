"""A picture of the edge study: latency by size of the fleet, and by the rate of links."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from moesaic_lab.pictures.charts import chart

Points = Sequence[Mapping[str, Any]]
LINES = "-", "--", ":", "-."


def draw(points: Points, to: Path) -> None:
    """Draw mean latencies by GPUs, at the middle rate of links, and by rate, at the shortest gaps.

    Args:
        points: as ``moesaic simulate edge --json`` has them.
        to: a file, whose name says its format.
    """
    rates, gaps = _values(points, "mbit_per_s"), _values(points, "gap_s")
    rate, gap = rates[len(rates) // 2], gaps[0]
    at_rate = [each for each in points if each["mbit_per_s"] == rate]
    at_gap = [each for each in points if each["gap_s"] == gap]
    with chart(to, 1, (11, 4.5), columns=2, same_x=False) as (left, right):
        _lines(left, at_rate, "gpus", "gap_s", "{policy}, every {gap_s:g} s")
        _lines(right, at_gap, "mbit_per_s", "gpus", "{policy}, {gpus} GPUs")
        left.set_xlabel(f"GPUs, links of {rate:g} Mbit/s")
        right.set_xlabel(f"Mbit/s, a request every {gap:g} s at each server")
        for axes, places in ((left, _values(points, "gpus")), (right, rates)):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(places, [f"{each:g}" for each in places])
            axes.minorticks_off()
            axes.set_ylabel("mean latency, s")
            axes.legend(fontsize="xx-small", loc="upper left", bbox_to_anchor=(1, 1))


def _lines(axes: Axes, points: Points, along: str, apart: str, label: str) -> None:
    policies = list(dict.fromkeys(each["policy"] for each in points))
    for colour, policy in enumerate(policies):
        for style, value in enumerate(_values(points, apart)):
            mine = [each for each in points if each["policy"] == policy and each[apart] == value]
            axes.plot(
                [each[along] for each in mine],
                [each["mean_latency_s"] for each in mine],
                color=f"C{colour}",
                linestyle=LINES[style % len(LINES)],
                marker=".",
                label=label.format(**mine[0]),
            )


def _values(points: Points, name: str) -> list[float]:
    return sorted({each[name] for each in points})
