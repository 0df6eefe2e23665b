"""A picture of the burst: latencies and thresholds of all arms over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic_lab.pictures.charts import chart, over_time

COLOURS = {"none": "tab:red", "paper": "tab:orange", "ours": "tab:blue"}
PANELS = {  # keys of series, and what they show
    "unanswered_per_s": "requests a second:\ndue, and refused",
    "ttft_p90_s": "first token,\nP90, s",
    "tpot_p90_s": "later tokens,\nP90 of means, s",
    "prefill_threshold": "threshold\nof prompts",
    "decode_threshold": "threshold\nof answers",
}
TARGETS = {"ttft_p90_s": "ttft_s", "tpot_p90_s": "tpot_s"}


def draw(result: Mapping[str, Any], to: Path) -> None:
    """Draw latencies and thresholds of all arms over time, into a file whose name says its format."""
    config, targets = result["config"], result["figures"]["targets"]
    series = result["series"]
    with chart(to, len(PANELS), (8, 10)) as panels:
        for axes, (key, label) in zip(panels, PANELS.items(), strict=True):
            for arm, own in series.items():
                over_time(axes, own[key], own["step_s"], arm, COLOURS[arm])
            if target := targets.get(TARGETS.get(key, "")):
                axes.axhline(target, color="black", linestyle=":", linewidth=1, label="target")
                axes.set_yscale("log")
            axes.axvspan(config["calm_s"], config["burst_end_s"], color="0.93")
            axes.set_ylabel(label)
            if "threshold" in key:
                axes.set_ylim(-0.05, 1.05)
        first = next(iter(series.values()))
        over_time(panels[0], first["due_per_s"], first["step_s"], "due", "black")
        panels[1].legend(loc="upper left", ncols=4, fontsize="small")
        panels[0].set_title("A burst of twice the requests (shaded), by arm", fontsize="medium")
        panels[-1].set_xlabel("seconds")
