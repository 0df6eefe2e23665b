"""A picture of a result: ``python -m benchmarks.brownout_burst.picture RESULT.json PICTURE.png`` draws it again."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"none": "tab:red", "paper": "tab:orange", "ours": "tab:blue"}
PANELS = {  # keys of series, and what they show
    "unanswered_per_s": "requests a second:\ndue, and refused",
    "ttft_p90_s": "first token,\nP90, s",
    "tpot_p90_s": "later tokens,\nP90 of means, s",
    "prefill_threshold": "threshold\nof prompts",
    "decode_threshold": "threshold\nof answers",
}
TARGETS = {"ttft_p90_s": "ttft_s", "tpot_p90_s": "tpot_s"}


def draw(
    config: Mapping[str, Any], targets: Mapping[str, float], series: Mapping[str, Any], to: Path
) -> None:
    """Draw latencies and thresholds of all arms over time.

    Args:
        config: of the result: when the burst begins and ends.
        targets: ``ttft_s`` and ``tpot_s``.
        series: by arm, as ``series_of`` gathers them.
        to: a file, whose name says its format.
    """
    figure = Figure(figsize=(8, 10), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(PANELS), 1, sharex=True))
    for axes, (key, label) in zip(panels, PANELS.items(), strict=True):
        for arm, own in series.items():
            _plot(axes, own, key, color=COLOURS[arm], label=arm)
        if target := targets.get(TARGETS.get(key, "")):
            axes.axhline(target, color="black", linestyle=":", linewidth=1, label="target")
            axes.set_yscale("log")
        axes.axvspan(config["calm_s"], config["burst_end_s"], color="0.93")
        axes.set_ylabel(label)
        if "threshold" in key:
            axes.set_ylim(-0.05, 1.05)
    _plot(panels[0], next(iter(series.values())), "due_per_s", color="black", label="due")
    panels[1].legend(loc="upper left", ncols=4, fontsize="small")
    panels[0].set_title("A burst of twice the requests (shaded), by arm", fontsize="medium")
    panels[-1].set_xlabel("seconds")
    figure.savefig(to, dpi=100, metadata={"Software": None} if to.suffix == ".png" else None)


def _plot(axes: Axes, own: Mapping[str, Any], key: str, color: str, label: str) -> None:
    values = [float("nan") if value is None else value for value in own[key]]
    times = [at * own["step_s"] for at in range(len(values))]
    axes.plot(times, values, color=color, linewidth=1.2, label=label)


def main() -> None:
    """Draw a result that was written with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    draw(result["config"], result["figures"]["targets"], result["series"], arguments.picture)


if __name__ == "__main__":
    main()
