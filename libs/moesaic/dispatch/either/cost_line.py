"""Chooses to route rows or to gather experts: measured costs in, a choice out. Pure.

Routing costs by the row, gathering by the layer. So few rows are better routed, and for many rows
experts are better gathered. The number in between depends on the machines, so both ways are
measured all the time.
"""

from dataclasses import dataclass, field
from typing import Literal

from moesaic.costs import CostBook

Way = Literal["route", "gather"]
WAYS: tuple[Way, ...] = ("route", "gather")

_LOOK_AGAIN = 256  # steps after which a way that is never chosen is measured again


@dataclass(frozen=True)
class WayChoice:
    """A way, and the expected cost of each."""

    way: Way
    predicted_s: dict[Way, float]  # of ways that were measured before
    exploring: bool  # chosen to be measured, not because it should be faster


@dataclass
class WayChooser:
    """Chooses for each step, and learns from its time.

    Attributes:
        costs: of both ways.
    """

    costs: CostBook = field(default_factory=CostBook)
    _unmeasured: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))  # steps

    def choose(self, rows: int, possible: tuple[Way, ...] = WAYS) -> WayChoice:
        """Choose the way that should be faster for ``rows`` rows, or try one that is not known."""
        predicted_s = {
            way: self.costs.fit(way).cost().seconds(1, rows) for way in possible if self._known(way)
        }
        unknown = [way for way in possible if not self._known(way)]
        stale = [way for way in possible if self._unmeasured[way] >= _LOOK_AGAIN]
        for way in (*unknown, *stale):
            return WayChoice(way, predicted_s, exploring=len(possible) > 1)
        return WayChoice(
            min(predicted_s, key=predicted_s.__getitem__), predicted_s, exploring=False
        )

    def learn(self, way: Way, rows: int, seconds: float) -> None:
        """Note the time of a step."""
        self.costs.add(way, (1, rows), seconds)
        for each in WAYS:
            self._unmeasured[each] = 0 if each == way else self._unmeasured[each] + 1

    def _known(self, way: Way) -> bool:
        return self.costs.fit(way).is_known
