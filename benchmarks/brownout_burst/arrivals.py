"""Arrivals of a real trace, stretched so that their rate is what the bench needs it to be."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path

AZURE = Path(__file__).parents[1] / "data/azure2023_conv.arrivals.csv.gz"


@dataclass(frozen=True)
class RateStretch:
    """Seconds at one mean rate."""

    duration_s: float
    per_s: float


def azure_gaps() -> list[float]:
    """Read the seconds between the arrivals of the trace; see ``benchmarks/data/README.md``."""
    with gzip.open(AZURE, "rt", encoding="utf-8") as file:
        times = [float(line) for line in file.read().split()[1:]]
    return [after - before for before, after in pairwise(times)]


def arrivals(gaps: Sequence[float], stretches: Sequence[RateStretch]) -> list[float]:
    """Lay the trace over the stretches.

    Each stretch takes as many of the trace's gaps, in their order, as its rate asks for, and scales them alike, so that
    they fill it. So the mean rates are met exactly, while gaps within a stretch keep their proportions, and the trace's
    own ups and downs stay. A trace that is used up begins anew.

    Args:
        gaps: seconds between arrivals, of the trace.
        stretches: one after the other.

    Returns:
        Seconds from the start at which requests arrive, in order.
    """
    left, found, start = cycle(gaps), list[float](), 0.0
    for stretch in stretches:
        own = list(islice(left, round(stretch.duration_s * stretch.per_s)))
        scale, at = stretch.duration_s / sum(own) if own else 0.0, 0.0
        for gap in own:
            found.append(start + at * scale)
            at += gap
        start += stretch.duration_s
    return found
