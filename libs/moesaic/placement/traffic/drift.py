"""Drift: has the routing of one origin changed, or is it noise?

The paper's own run needed two migrations after a shift, for it planned on old and new data mixed (DanceMoE
§IV-B, Fig. 7). A planner that knows of the shift can drop the old data.
"""

from typing import Any

import numpy as np

from moesaic.placement.traffic.statistics import Floats

UNIT_ROWS = 256  # least rows of a unit, in the layer with most of them
SPANS = (4, 8, 16)  # units that are recent: the longer, the smaller a shift may be to be seen
KEPT_UNITS = 48  # from before, that the noise is measured on
LEAST_BEFORE = 2  # spans from before, without which nothing is concluded
LEAST_DISTANCE = 0.05  # a smaller one is not worth a migration, however certain it is
MAX_OLDER = 256  # units that ones still older count for; with few, slow changes would go unseen


class DriftTest:
    """Compares the routing of an origin with its earlier routing, and with its own noise.

    Windows are gathered to units of enough rows. The distance of two spans of units is the total variation
    of their experts' mean parts, in the mean over layers. Rows of one prompt are alike, so no formula gives
    the noise. It is measured as the distance of each earlier span from the rest. A change of rate is no
    drift: it only makes units of more or fewer windows.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self._units: list[Floats] = []  # [L, E] each: the experts' parts, oldest first
        self._older: Floats | float = 0.0  # sum of the units that are no longer kept
        self._num_older = 0
        self._gathered: Floats | float = 0.0
        self._rows = 0
        self.num_units = 0

    def add(self, tokens: Floats, rows: int) -> int:
        """Take in a window, and test if a unit is complete.

        Args:
            tokens: ``[L, E]``, rows that chose the expert.
            rows: rows of the window.

        Returns:
            The units in which a shift showed, one of ``SPANS``; 0: none did. After a shift begin a new test.
        """
        self._gathered, self._rows = self._gathered + tokens, self._rows + rows
        if self._rows < UNIT_ROWS:
            return 0
        self._append(_parts(self._gathered))
        self._gathered, self._rows = 0.0, 0
        kept = np.stack(self._units)
        enough = [span for span in SPANS if len(kept) >= span * (LEAST_BEFORE + 2)]
        return next((span for span in enough if self._shifted(kept, span)), 0)

    def _append(self, unit: Floats) -> None:
        self._units.append(unit)
        self.num_units += 1
        if len(self._units) > KEPT_UNITS + 2 * max(SPANS):
            self._older, self._num_older = self._older + self._units.pop(0), self._num_older + 1
        if self._num_older > MAX_OLDER:
            self._older, self._num_older = self._older * (MAX_OLDER / self._num_older), MAX_OLDER

    def _shifted(self, units: Floats, span: int) -> bool:
        # Units just before the recent ones may be new too: for a while they are on neither side.
        recent, before = units[-span:], units[: -2 * span]
        found = _distances(recent.sum(axis=0), before.sum(axis=0) + self._older)
        return bool(found > max(LEAST_DISTANCE, _noise(recent, before[-KEPT_UNITS:])))


def _noise(recent: Floats, before: Floats) -> float:
    """The distance up to which two spans may be of the same routing.

    Twice the largest earlier distance, and four standard deviations. It grows in proportion if the recent
    units differ more from each other than earlier ones did, as with fewer prompts in each.

    Args:
        recent: ``[span, L, E]``.
        before: ``[units, L, E]``, at least two spans.
    """
    upto = np.concatenate([np.zeros_like(before[:1]), before.cumsum(axis=0)])
    # Of neighbours, as one request may last.
    spans = upto[len(recent) :] - upto[: -len(recent)]
    distances = _distances(spans, before.sum(axis=0) - spans)
    level = max(2 * distances.max(), distances.mean() + 4 * distances.std())
    return float(level * max(1.0, _spread(recent) / max(_spread(before), 1e-12)))


def _spread(units: Floats) -> float:
    """Mean distance of a unit from the others, as if there were very many of them."""
    apart = _distances(units, units.sum(axis=0) - units).mean()
    return float(apart * np.sqrt(1 - 1 / len(units)))


def _distances(one: Floats, other: Floats) -> Any:
    """Total variation distance of ``[..., L, E]``, in the mean over the layers that both have: ``[...]``."""
    both = (one.sum(axis=-1) > 0) & (other.sum(axis=-1) > 0)
    apart = 0.5 * np.abs(_parts(one) - _parts(other)).sum(axis=-1)
    return (apart * both).sum(axis=-1) / np.maximum(both.sum(axis=-1), 1)


def _parts(tokens: Floats | float) -> Floats:
    counts = np.asarray(tokens, np.float64)
    parts: Floats = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1e-300)
    return parts
