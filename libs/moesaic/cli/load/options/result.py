"""Options about the figures that are shown, and the file that keeps them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from moesaic.cli.load.options.server import pairs
from moesaic.cli.terminal.options import option
from moesaic.cli.terminal.outcome import CommandError, Exit

PANEL = "Result"
# Of a request, and of a request before it was sent too.
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The figures that are shown and kept of a load.

    Raises:
        CommandError: a metric, a percentile, a goal or a note is wrong.
    """

    percentile_metrics: Annotated[
        str,
        option(
            f"Of {','.join(METRICS)} (default: ttft,tpot,itl; of embeddings e2el).",
            panel=PANEL,
        ),
    ] = ""
    metric_percentiles: Annotated[str, option("Such as 50,99.", panel=PANEL)] = "99"
    goodput: Annotated[
        list[str] | None,
        option(
            "Targets of a good request, such as ttft:200 tpot:50.",
            metavar="NAME:MS ...",
            panel=PANEL,
        ),
    ] = None
    label: Annotated[str, option("Begins the file's name (default: the backend).", panel=PANEL)] = (
        ""
    )
    metadata: Annotated[
        list[str] | None, option("Notes for the file.", metavar="KEY=VALUE ...", panel=PANEL)
    ] = None
    save_result: Annotated[
        bool, option("Write a JSON file.", switch="--save-result", panel=PANEL)
    ] = False
    save_detailed: Annotated[
        bool, option("Also each request, in that file.", switch="--save-detailed", panel=PANEL)
    ] = False
    append_result: Annotated[
        bool,
        option("Write a further line to that file instead.", switch="--append-result", panel=PANEL),
    ] = False
    result_dir: Annotated[
        Path, option("Directory of that file; made if there is none.", panel=PANEL)
    ] = Path()
    result_filename: Annotated[
        str,
        option("Its name (default: from label, rate, model and time).", panel=PANEL),
    ] = ""

    def __post_init__(self) -> None:
        # Read to refuse what is wrong.
        _ = self.metrics(is_pooling=False), self.percentiles, self.goals, self.notes

    def metrics(self, *, is_pooling: bool) -> list[str]:
        """List the metrics that are shown, in the order of ``METRICS``."""
        default = "e2el" if is_pooling else "ttft,tpot,itl"
        asked = _listed("--percentile-metrics", self.percentile_metrics or default)
        if unknown := [each for each in asked if each not in METRICS]:
            text = f"--percentile-metrics {unknown[0]}: give some of {','.join(METRICS)}"
            raise CommandError(text, Exit.USAGE)
        return [each for each in METRICS if each in asked]

    @property
    def percentiles(self) -> list[float]:
        """From 0 to 100."""
        return [
            _percentile(each) for each in _listed("--metric-percentiles", self.metric_percentiles)
        ]

    @property
    def goals(self) -> dict[str, float]:
        """Largest values in milliseconds, by metric."""
        found = {}
        for pair in " ".join(self.goodput or ()).split():
            name, _, value = pair.partition(":")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = math.nan
            if name not in GOALS or not found[name] >= 0:
                why = f"write NAME:MS, with a name of {', '.join(GOALS)}"
                raise CommandError(f"--goodput {pair}: {why}", Exit.USAGE)
        return found

    @property
    def notes(self) -> dict[str, str]:
        """Metadata for the file."""
        return dict(pairs("--metadata", self.metadata))

    @property
    def is_kept(self) -> bool:
        """A file is written."""
        return self.save_result or self.append_result


def _listed(flag: str, text: str) -> Sequence[str]:
    found = [each.strip() for each in text.split(",") if each.strip()]
    if not found:
        raise CommandError(f"{flag}: is empty", Exit.USAGE)
    return found


def _percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        text = f"--metric-percentiles {text}: give numbers from 0 to 100, such as 50,99"
        raise CommandError(text, Exit.USAGE)
    return value
