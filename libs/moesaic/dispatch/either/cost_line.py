"""Chooses to route rows or to gather experts: measured costs in, a choice out. Pure.

Routing costs by the row, gathering by the layer. So few rows are better routed, and for many rows
experts are better gathered. The number in between depends on the machines, so both ways are
measured all the time.
"""

from dataclasses import dataclass, field
from typing import Literal

Way = Literal["route", "gather"]
WAYS: tuple[Way, ...] = ("route", "gather")

_FADES = 0.98  # what a measurement weighs after the next one
_LOOK_AGAIN = 256  # steps after which a way that is never chosen is measured again


@dataclass
class Line:
    """Seconds as a line over rows, fitted to measurements of which the newest count most."""

    weight: float = 0.0
    rows: float = 0.0  # weighted sums from here on
    seconds: float = 0.0
    rows_squared: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Learn one measurement."""
        self.weight = self.weight * _FADES + 1
        self.rows = self.rows * _FADES + rows
        self.seconds = self.seconds * _FADES + seconds
        self.rows_squared = self.rows_squared * _FADES + rows * rows
        self.rows_seconds = self.rows_seconds * _FADES + rows * seconds

    def at(self, rows: int) -> float:
        """Seconds that ``rows`` rows should take; never negative, and never less for more rows."""
        mean_rows, mean_s = self.rows / self.weight, self.seconds / self.weight
        spread = self.rows_squared / self.weight - mean_rows**2
        if spread <= 1e-9 * mean_rows**2:  # one size was seen: assume the steepest line
            return mean_s * max(1.0, rows / mean_rows)
        slope = max(0.0, (self.rows_seconds / self.weight - mean_rows * mean_s) / spread)
        return max(0.0, mean_s + slope * (rows - mean_rows))


@dataclass(frozen=True)
class WayChoice:
    """A way, and the expected cost of each."""

    way: Way
    predicted_s: dict[Way, float]  # of ways that were measured before
    exploring: bool  # chosen to be measured, not because it should be faster


@dataclass
class WayChooser:
    """Chooses for each step, and learns from its time."""

    _lines: dict[Way, Line] = field(default_factory=lambda: {way: Line() for way in WAYS})
    _unmeasured: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))  # steps

    def choose(self, rows: int, possible: tuple[Way, ...] = WAYS) -> WayChoice:
        """Choose the way that should be faster for ``rows`` rows, or try one that is not known."""
        predicted_s = {way: self._lines[way].at(rows) for way in possible if self._known(way)}
        unknown = [way for way in possible if not self._known(way)]
        stale = [way for way in possible if self._unmeasured[way] >= _LOOK_AGAIN]
        for way in (*unknown, *stale):
            return WayChoice(way, predicted_s, exploring=len(possible) > 1)
        return WayChoice(
            min(predicted_s, key=predicted_s.__getitem__), predicted_s, exploring=False
        )

    def learn(self, way: Way, rows: int, seconds: float) -> None:
        """Note the time of a step."""
        self._lines[way].add(rows, seconds)
        for each in WAYS:
            self._unmeasured[each] = 0 if each == way else self._unmeasured[each] + 1

    def _known(self, way: Way) -> bool:
        return self._lines[way].weight > 0
