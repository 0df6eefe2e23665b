"""A picture of the real run: load, latencies, workers and thresholds over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from moesaic_lab.pictures.charts import chart, over_time

COLOURS = {"small": "tab:red", "large": "tab:green", "auto": "tab:blue"}
LABELS = {"small": "1A1E", "large": "2A2E", "auto": "scaled by the scheduler"}
LATENCIES = {
    "ttft_p90_s": ("first token,\nP90, s", "ttft_s"),
    "tpot_p90_s": ("later tokens,\nP90 of means, s", "tpot_s"),
}


def draw(result: Mapping[str, Any], to: Path) -> None:
    """Draw the arms over each other, and the numbers of workers of the one that scales.

    Args:
        result: ``config`` with ``stretch_s``, ``figures`` with ``targets``, and ``series`` by arm.
        to: a file, whose name says its format.
    """
    config, series = result["config"], result["series"]
    auto = series["auto"]
    with chart(to, 5, (8, 10)) as panels:
        _plot(panels[0], auto, "due_per_s", color="black")
        panels[0].set_ylabel("requests\na second")
        for axes, (key, (label, target)) in zip(panels[1:3], LATENCIES.items(), strict=True):
            for arm, own in series.items():
                _plot(axes, own, key, color=COLOURS[arm], label=LABELS[arm])
            limit = result["figures"]["targets"][target]
            axes.axhline(limit, color="black", linestyle=":", label="target")
            axes.set_yscale("log")
            axes.set_ylabel(label)
        panels[1].legend(loc="upper left", ncols=4, fontsize="small")
        _plot(panels[3], auto, "attention", color="tab:purple", label="attention workers")
        _plot(panels[3], auto, "experts", color="tab:brown", label="expert workers")
        panels[3].set_ylim(0.8, 2.2)
        panels[3].set_ylabel("active workers")
        panels[3].legend(loc="upper left", ncols=2, fontsize="small")
        _plot(panels[4], auto, "prefill_threshold", color="tab:blue", label="prompts")
        _plot(panels[4], auto, "decode_threshold", color="tab:cyan", label="answers")
        panels[4].set_ylim(-0.05, 1.05)
        panels[4].set_ylabel("threshold\nof brownout")
        panels[4].legend(loc="lower left", ncols=2, fontsize="small")
        for axes in panels:
            for at in range(1, 2 * config["doublings"], 2):
                axes.axvspan(at * config["stretch_s"], (at + 1) * config["stretch_s"], color="0.93")
            for at_s in auto["decided_at_s"]:
                axes.axvline(at_s, color="tab:gray", linewidth=0.7, linestyle="--")
        panels[0].set_title("Twice the requests (shaded); decisions dashed", fontsize="medium")
        panels[-1].set_xlabel("seconds")


def _plot(axes: Axes, own: Mapping[str, Any], key: str, color: str, label: str = "") -> None:
    over_time(axes, own[key], own["step_s"], label, color)
