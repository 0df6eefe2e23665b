"""Traffic by origin: its demand, without what was before a shift."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.activation import ActivationWindow
from moesaic.placement.traffic.drift import DriftTest
from moesaic.placement.traffic.origins import DemandByOrigin, tokens_of
from moesaic.placement.traffic.statistics import Floats

# Units of new data that a plan after a shift needs at least. A shift that was seen in more of them, because there is
# much noise, needs as many.
SETTLE_UNITS = 6
LONGEST_SETTLE_S = 300.0  # plans wait no longer for an origin, for it may have fallen silent


@dataclass(frozen=True)
class _Settling:
    since_s: float
    units: int  # of new data to wait for


class OriginTraffic:
    """Demand by origin, which starts anew when the routing of an origin has shifted.

    The window that shows a shift may have rows from before it. So it is dropped with all that came earlier:
    the demand of an origin that is settling rests on later windows only, and is 0 until the first. Plans that
    can wait should do so while any origin settles. Then there is one plan after a shift, on new data only
    (DanceMoE §IV-B, Fig. 7, needed two).

    Attributes:
        shifts: shifts seen, by origin.
        last_shift_s: when the latest was seen; None if none was.
    """

    def __init__(
        self,
        num_experts: int,
        layers: Sequence[int],
        half_life_s: float,
    ) -> None:
        """Start with no origin.

        Args:
            num_experts: of each layer, E.
            layers: the decoder layers that have experts, in order.
            half_life_s: after so many seconds rows count half.

        Raises:
            InvalidInput: ``half_life_s`` is not positive.
        """
        self._num_experts, self._layers = num_experts, tuple(layers)
        self._demand = DemandByOrigin(num_experts, layers, half_life_s)
        self._tests: dict[str, DriftTest] = {}
        self._settling: dict[str, _Settling] = {}
        self.shifts: Counter[str] = Counter()
        self.last_shift_s: float | None = None

    @property
    def origins(self) -> frozenset[str]:
        """Origins with data."""
        return self._demand.origins

    def add(self, window: ActivationWindow, now_s: float) -> bool:
        """Take in the window of the origin ``window.worker_id``.

        Args:
            window: what its requests routed since its last one.
            now_s: when it came, in seconds of a clock that never goes back.

        Returns:
            Whether it shows a shift.

        Raises:
            InvalidInput: the window cannot be true, or has other layers; then nothing changes.
        """
        origin = window.worker_id
        tokens = tokens_of(window, self._num_experts, self._layers)
        self._demand.add(window, now_s)
        test = self._tests.setdefault(origin, DriftTest())
        span = test.add(tokens, max((seen.rows for seen in window.layers), default=0))
        settling = self._settling.get(origin)
        if settling and test.num_units >= settling.units:
            del self._settling[origin]
        if not span:
            return False
        self._demand.forget(origin)
        del self._tests[origin]
        self._settling[origin] = _Settling(now_s, max(span, SETTLE_UNITS))
        self.shifts[origin] += 1
        self.last_shift_s = now_s
        return True

    def demand(self, origins: Sequence[str], now_s: float) -> Floats:
        """Rows per second of some origins, float64 ``[N, L, E]``; see ``DemandByOrigin.demand``."""
        return self._demand.demand(origins, now_s)

    def rows(self, origins: Sequence[str], now_s: float) -> Floats:
        """Rows that the demand of some origins rests on, float64 ``[N]``; see ``DemandByOrigin.rows``."""
        return self._demand.rows(origins, now_s)

    def seen(self, origins: Sequence[str]) -> NDArray[np.bool_]:
        """Tell which of some origins have data: bool ``[N]``."""
        return self._demand.seen(origins)

    def settling(self, now_s: float) -> set[str]:
        """Origins that shifted, and of which there is too little new data for a plan."""
        return {
            origin
            for origin, settling in self._settling.items()
            if now_s - settling.since_s < LONGEST_SETTLE_S
        }

    def forget(self, origin: str) -> None:
        """Drop all that is known of an origin; without effect if that is nothing."""
        self._demand.forget(origin)
        for known in (self._tests, self._settling, self.shifts):
            known.pop(origin, None)
