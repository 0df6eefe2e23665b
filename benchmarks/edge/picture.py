"""A picture of a result: ``python -m benchmarks.edge.picture RESULT.json PICTURE.png`` draws it again."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"migrating": "tab:blue", "staying": "tab:red"}
SETTINGS = {"specialised": "tab:blue", "mixed": "tab:orange"}


def draw(figures: Mapping[str, Any], series: Mapping[str, Any], to: Path) -> None:
    """Draw local shares while tasks change places, and the mean latency by policy.

    Args:
        figures: of the result.
        series: of the result; without ``swap`` that panel stays empty.
        to: a file, whose name says its format.
    """
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1)
    if "swap" in series:
        _draw_swap(above, series["swap"])
    _draw_latencies(below, {name: figures[name] for name in SETTINGS if name in figures})
    figure.savefig(to, dpi=100, metadata={"Software": None} if to.suffix == ".png" else None)


def _draw_swap(axes: Axes, swap: Mapping[str, Any]) -> None:
    for arm, colour in COLOURS.items():
        shares = swap[arm]["local_share"][0]
        values = [float("nan") if share is None else share for share in shares]
        times = [
            swap[arm]["start_s"] + (at + 0.5) * swap[arm]["step_s"] for at in range(len(values))
        ]
        axes.plot(times, values, color=colour, label=arm)
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


def main() -> None:
    """Draw a result that was written with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    draw(result["figures"], result["series"], arguments.picture)


if __name__ == "__main__":
    main()
