"""Traffic by origin: what the requests of each edge server route to every expert, without what was before a shift."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.messages.activation import ActivationWindow
from moesaic.placement.traffic.drift import DriftTest
from moesaic.placement.traffic.statistics import Floats, require_plausible

# Units of new data that a plan after a shift needs at least. A shift that was seen in more of them, because there is
# much noise, needs as many.
SETTLE_UNITS = 6
LONGEST_SETTLE_S = 300.0  # plans wait no longer for an origin, for it may have fallen silent


def tokens_of(window: ActivationWindow, num_experts: int, layers: Sequence[int]) -> Floats:
    """Counts of a window as one array.

    Args:
        window: a window of any origin.
        num_experts: experts of each layer, E.
        layers: the decoder layers that have experts, in order.

    Returns:
        float64 ``[L, E]``: rows that chose the expert; 0 in a layer without traffic.

    Raises:
        InvalidInput: the window is inconsistent, or has other layers.
    """
    require_plausible(window, num_experts)
    at = {layer: idx for idx, layer in enumerate(layers)}
    tokens = np.zeros((len(layers), num_experts))
    for seen in window.layers:
        if seen.layer not in at:
            raise InvalidInput("layers", f"has no layer {seen.layer} with experts")
        tokens[at[seen.layer]] = seen.tokens
    return tokens


@dataclass
class _Origin:
    """Counts and the time they took, both as of ``at_s`` and with the same weights."""

    tokens: Floats  # [L, E]
    rows: float  # of the layer that had most
    seconds: float
    at_s: float
    until_s: float  # up to here windows tell what was; later than ``at_s`` if they came early
    window_s: float  # length of the latest, after which the next is due


@dataclass(frozen=True)
class _Settling:
    since_s: float
    units: int  # of new data to wait for


class OriginTraffic:
    """Demand by origin, older rows counting less; it starts anew when the routing of an origin has shifted.

    An origin is named by its ``worker_id``, so what it asks for outlives a restart. Origins send nothing
    while they have no traffic: such silence counts as time without rows, and demand fades in it. Memory is
    bounded by the origins that the caller admits and does not ``forget``.

    The window that shows a shift may have rows from before it. So it is dropped with all that came earlier:
    the demand of an origin that is settling rests on later windows only, and is 0 until the first. Plans that
    can wait should do so while any origin settles. Then there is one plan after a shift, on new data only
    (DanceMoE §IV-B, Fig. 7, needed two).

    Attributes:
        shifts: shifts seen, by origin.
        last_shift_s: when the latest was seen; None if none was.
    """

    def __init__(self, num_experts: int, layers: Sequence[int], half_life_s: float) -> None:
        """Start with no origin.

        Args:
            num_experts: experts of each layer, E.
            layers: the decoder layers that have experts, in order.
            half_life_s: age in seconds at which rows count half.

        Raises:
            InvalidInput: ``half_life_s`` is not positive.
        """
        if not half_life_s > 0:
            raise InvalidInput("half_life_s", f"must be positive, got {half_life_s}")
        self._num_experts, self._layers = num_experts, tuple(layers)
        self._half_life_s = half_life_s
        self._origins: dict[str, _Origin] = {}
        self._tests: dict[str, DriftTest] = {}
        self._settling: dict[str, _Settling] = {}
        self.shifts: Counter[str] = Counter()
        self.last_shift_s: float | None = None

    @property
    def origins(self) -> frozenset[str]:
        """Origins with data."""
        return frozenset(self._origins)

    def add(self, window: ActivationWindow, now_s: float) -> bool:
        """Add the window of the origin ``window.worker_id``.

        Args:
            window: choices of its requests since its last window.
            now_s: time of arrival, by a monotonic clock.

        Returns:
            True if it shows a shift.

        Raises:
            InvalidInput: the window is inconsistent, or has other layers; then nothing changes.
        """
        origin = window.worker_id
        tokens = tokens_of(window, self._num_experts, self._layers)
        self._count(window, tokens, now_s)
        test = self._tests.setdefault(origin, DriftTest())
        span = test.add(tokens, max((seen.rows for seen in window.layers), default=0))
        settling = self._settling.get(origin)
        if settling and test.num_units >= settling.units:
            del self._settling[origin]
        if not span:
            return False
        del self._origins[origin]
        del self._tests[origin]
        self._settling[origin] = _Settling(now_s, max(span, SETTLE_UNITS))
        self.shifts[origin] += 1
        self.last_shift_s = now_s
        return True

    def _count(self, window: ActivationWindow, tokens: Floats, now_s: float) -> None:
        rows = max((float(seen.rows) for seen in window.layers), default=0.0)
        window_s = window.window_s
        seen = self._origins.get(window.worker_id)
        if seen is None:
            found = _Origin(tokens, rows, window_s, now_s, now_s, window_s)
            self._origins[window.worker_id] = found
            return
        keep = self._keep(now_s - seen.at_s)
        silence_s = self._faded(now_s - window_s - seen.until_s)
        seen.tokens, seen.rows = seen.tokens * keep + tokens, seen.rows * keep + rows
        seen.seconds = seen.seconds * keep + silence_s * self._keep(window_s) + window_s
        # A window that came late makes the next one seem early: what it covers is not silence either.
        # Windows of long ago that come all at once (a new leader reads them) must not hide more.
        seen.until_s = min(max(now_s, seen.until_s + window_s), now_s + window_s)
        seen.at_s, seen.window_s = max(now_s, seen.at_s), window_s

    def demand(self, origins: Sequence[str], now_s: float) -> Floats:
        """Demand of some origins, as a placement problem takes it.

        Args:
            origins: names, in the order of the result.
            now_s: the time, of the clock of ``add``.

        Returns:
            float64 ``[N, L, E]``: rows per second, each counted once for every expert that it chose; 0 for
            an origin without data.
        """
        rates = np.zeros((len(origins), len(self._layers), self._num_experts))
        for n, origin in enumerate(origins):
            seen = self._origins.get(origin)
            if seen is None:
                continue
            keep = self._keep(now_s - seen.at_s)
            # Silence begins when the next window is overdue, not right after the latest.
            silence_s = self._faded(now_s - seen.window_s - seen.until_s)
            seconds = seen.seconds * keep + silence_s
            if seconds > 0:
                rates[n] = seen.tokens * keep / seconds
        return rates

    def rows(self, origins: Sequence[str], now_s: float) -> Floats:
        """Weighted rows behind the demand of some origins, float64 ``[N]``; older ones count less."""
        known = [self._origins.get(origin) for origin in origins]
        return np.array(
            [seen.rows * self._keep(now_s - seen.at_s) if seen else 0.0 for seen in known]
        )

    def seen(self, origins: Sequence[str]) -> NDArray[np.bool_]:
        """Tell which of some origins have data: bool ``[N]``."""
        return np.array([origin in self._origins for origin in origins], bool)

    def settling(self, now_s: float) -> set[str]:
        """Origins that shifted, and of which there is too little new data for a plan."""
        return {
            origin
            for origin, settling in self._settling.items()
            if now_s - settling.since_s < LONGEST_SETTLE_S
        }

    def forget(self, origin: str) -> None:
        """Drop all data of an origin; unknown origins are ignored."""
        for known in (self._origins, self._tests, self._settling, self.shifts):
            known.pop(origin, None)

    def _keep(self, age_s: float) -> float:
        return float(0.5 ** (max(0.0, age_s) / self._half_life_s))

    def _faded(self, silence_s: float) -> float:
        """Weigh the seconds of a silence that has just ended by their age."""
        return self._half_life_s / log(2) * (1 - self._keep(silence_s))
