"""A picture of a study of fleets over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from moesaic_lab.pictures.charts import chart, over_time


def draw(facts: Mapping[str, Any], to: Path) -> None:
    """Draw requests, the shape of our fleet, and the devices of all fleets.

    Args:
        facts: what the command prints as JSON.
        to: a file, whose name says its format.
    """
    with chart(to, 3, (9, 8)) as panels:
        rates = facts["requests_per_s"]
        _steps(panels[0], rates["step_s"], rates["values"], "requests", color="black")
        panels[0].set_ylabel("requests a second")
        ours, *others = facts["series"]
        for side in ("attention", "experts"):
            _steps(panels[1], facts["series"][ours]["step_s"], facts["series"][ours][side], side)
        panels[1].set_ylabel("devices of each side,\nours")
        panels[1].legend(fontsize="small")
        for name in (ours, *others):
            own, row = facts["series"][name], facts["fleets"][name]
            _steps(
                panels[2], own["step_s"], own["devices"], f"{name}: {row['device_hours']:,.0f} h"
            )
        panels[2].set_ylabel("devices paid")
        panels[2].set_xlabel("hours")
        panels[2].legend(fontsize="small", ncols=2)
        for axes in panels:
            axes.set_ylim(bottom=0)
        config = facts["config"]
        panels[0].set_title(f"{config['model']} on {config['device']}", fontsize="medium")


def _steps(
    axes: Axes, step_s: float, values: list[float], label: str, color: str | None = None
) -> None:
    over_time(axes, values, step_s, label, color, unit_s=3600, stepped=True)
