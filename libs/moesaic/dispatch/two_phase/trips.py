"""Trips of a worker's rows to its lead and back: what they take, and how long one is waited for. Pure."""

_STALL = 4.0  # times the usual trip; the lead is waited for no longer
_LEAST_S, _FIRST_S, _UNKNOWN_S = 0.01, 0.1, 0.25  # at least; at a step's first layer; at first
_FADES = 0.8  # what a trip weighs after the next one


class TripTimes:
    """Learns from trips, by the size of the batch in powers of two."""

    def __init__(self) -> None:
        self._usual_s: dict[int, float] = {}  # by size

    def usual_s(self, rows: int) -> float | None:
        """Seconds that trips of so many rows took lately; ``None`` before the first one."""
        return self._usual_s.get(rows.bit_length())

    def patience_s(self, rows: int, *, first: bool) -> float:
        """Seconds that a trip is waited for, at a step's ``first`` layer or another."""
        usual_s = self.usual_s(rows)
        stall_s = _UNKNOWN_S if usual_s is None else _STALL * usual_s
        return max(_FIRST_S if first else _LEAST_S, stall_s)

    def took(self, rows: int, seconds: float) -> None:
        """Note a trip that was answered."""
        known = self._usual_s.get(rows.bit_length(), seconds)
        self._usual_s[rows.bit_length()] = _FADES * known + (1 - _FADES) * seconds
