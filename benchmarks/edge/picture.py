"""A picture of the edge benchmark: local shares while tasks change places, and the mean latency by policy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from moesaic_lab.pictures.charts import chart, over_time

COLOURS = {"migrating": "tab:blue", "staying": "tab:red"}
SETTINGS = {"specialised": "tab:blue", "mixed": "tab:orange"}


def draw(result: Mapping[str, Any], to: Path) -> None:
    """Draw both; a result without ``swap`` leaves the upper panel empty.

    Args:
        result: output of ``moesaic bench edge --json``.
        to: a file, whose name says its format.
    """
    figures, series = result["figures"], result["series"]
    with chart(to, 2, (8, 6.5), same_x=False) as (above, below):
        if "swap" in series:
            _draw_swap(above, series["swap"])
        _draw_latencies(below, {name: figures[name] for name in SETTINGS if name in figures})


def _draw_swap(axes: Axes, swap: Mapping[str, Any]) -> None:
    for arm, colour in COLOURS.items():
        step_s = swap[arm]["step_s"]
        middle_s = swap[arm]["start_s"] + step_s / 2
        over_time(axes, swap[arm]["local_share"][0], step_s, arm, colour, start_s=middle_s)
    axes.axvline(swap["shift_s"], color="black", linestyle=":", label="tasks change places")
    axes.set_ylabel("choices served by\nexperts there")
    axes.set_xlabel("seconds")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower left", fontsize="small")


def _draw_latencies(axes: Axes, by_setting: Mapping[str, Mapping[str, Any]]) -> None:
    width = 0.8 / len(by_setting)
    for n, (setting, by_policy) in enumerate(by_setting.items()):
        means = [own["mean_latency_s"] for own in by_policy.values()]
        spread = [own["mean_latency_s_of_rounds"] for own in by_policy.values()]
        errors = [
            [mean - low for mean, (low, _) in zip(means, spread, strict=True)],
            [high - mean for mean, (_, high) in zip(means, spread, strict=True)],
        ]
        places = [at + (n - (len(by_setting) - 1) / 2) * width for at in range(len(means))]
        axes.bar(places, means, width, yerr=errors, color=SETTINGS[setting], label=setting)
        axes.set_xticks(range(len(by_policy)), list(by_policy))
    axes.set_ylabel("mean latency, s\n(lines: rounds)")
    axes.legend(loc="upper right", fontsize="small")
