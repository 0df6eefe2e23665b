"""The one maker of charts, for commands and benchmarks: panels in a file, and values over time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@contextmanager
def chart(
    to: Path, rows: int, size: tuple[float, float], columns: int = 1, same_x: bool = True
) -> Iterator[list[Axes]]:
    """Give the panels of a chart, and write it at the end of the block.

    Args:
        to: a file, whose name says its format.
        rows: of panels.
        size: of the whole, in inches.
        columns: of panels.
        same_x: all panels have the same horizontal axis.
    """
    figure = Figure(figsize=size, layout="constrained")
    yield list(figure.subplots(rows, columns, sharex=same_x, squeeze=False).flat)
    figure.savefig(to, dpi=100, metadata={"Software": None} if to.suffix == ".png" else None)


def over_time(
    axes: Axes,
    values: Sequence[float | None],
    step_s: float,
    label: str = "",
    color: str | None = None,
    *,
    start_s: float = 0.0,
    unit_s: float = 1.0,
    stepped: bool = False,
) -> None:
    """Draw one value for each step of time.

    Args:
        axes: the panel.
        values: None leaves a gap.
        step_s: from one value to the next.
        label: in the legend; empty: it is not there.
        color: None: the next one.
        start_s: of the first value.
        unit_s: of the axis.
        stepped: each value holds until the next.
    """
    drawn = [float("nan") if value is None else value for value in values]
    times = [(start_s + at * step_s) / unit_s for at in range(len(drawn))]
    style = "steps-post" if stepped else "default"
    axes.plot(times, drawn, color=color, linewidth=1.2, label=label or None, drawstyle=style)
