"""A picture of the real run: load, latencies, workers and thresholds over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"small": "tab:red", "large": "tab:green", "auto": "tab:blue"}
LABELS = {"small": "1A1E", "large": "2A2E", "auto": "scaled by the scheduler"}
LATENCIES = {
    "ttft_p90_s": ("first token,\nP90, s", "ttft_s"),
    "tpot_p90_s": ("later tokens,\nP90 of means, s", "tpot_s"),
}


def draw(
    config: Mapping[str, Any], figures: Mapping[str, Any], series: Mapping[str, Any], to: Path
) -> None:
    """Draw the arms over each other, and the numbers of workers of the one that scales.

    Args:
        config: of the result, with ``stretch_s``.
        figures: with ``targets``.
        series: by arm, as ``series_of`` gathers them.
        to: a file, whose name says its format.
    """
    figure = Figure(figsize=(8, 10), layout="constrained")
    panels: list[Axes] = list(figure.subplots(5, 1, sharex=True))
    auto = series["auto"]
    _plot(panels[0], auto, "due_per_s", color="black")
    panels[0].set_ylabel("requests\na second")
    for axes, (key, (label, target)) in zip(panels[1:3], LATENCIES.items(), strict=True):
        for arm, own in series.items():
            _plot(axes, own, key, color=COLOURS[arm], label=LABELS[arm])
        axes.axhline(figures["targets"][target], color="black", linestyle=":", label="target")
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
    figure.savefig(to, dpi=100, metadata={"Software": None} if to.suffix == ".png" else None)


def _plot(axes: Axes, own: Mapping[str, Any], key: str, color: str, label: str = "") -> None:
    values = [float("nan") if value is None else value for value in own[key]]
    times = [at * own["step_s"] for at in range(len(values))]
    axes.plot(times, values, color=color, linewidth=1.2, label=label or None)
