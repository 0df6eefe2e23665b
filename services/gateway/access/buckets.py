"""A token bucket: an amount to spend, filling evenly. Exact: all its numbers are whole."""

MINUTE_NS = 60 * 10**9


class Bucket:
    """A minute's worth at most, filling at that rate; full at first. May be in debt.

    Times are nanoseconds on any clock that does not go back.
    """

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._full = per_minute * MINUTE_NS  # in units of which per_minute come in each nanosecond
        self._level = self._full
        self._at_ns = now_ns

    def spend(self, cost: int, now_ns: int) -> int:
        """Spend ``cost`` if that much is there; a cost of more than a minute's worth needs a full bucket.

        Returns:
            0, or the nanoseconds until another attempt succeeds if nobody else spends meanwhile.
        """
        self._fill(now_ns)
        needed = min(cost * MINUTE_NS, self._full)
        if self._level < needed:
            return -(-(needed - self._level) // self.per_minute)
        self._level -= cost * MINUTE_NS
        return 0

    def settle(self, refund: int, now_ns: int) -> None:
        """Correct what was spent: give back the unused part, or (negative) pay for use beyond it."""
        self._fill(now_ns)
        self._level = min(self._full, self._level + refund * MINUTE_NS)

    def remaining(self, now_ns: int) -> int:
        """Count the amount that could be spent now."""
        self._fill(now_ns)
        return max(0, self._level // MINUTE_NS)

    def full_after_ns(self, now_ns: int) -> int:
        """Count the nanoseconds until the bucket is full again if nobody spends."""
        self._fill(now_ns)
        return -(-(self._full - self._level) // self.per_minute)

    def _fill(self, now_ns: int) -> None:
        self._level = min(self._full, self._level + (now_ns - self._at_ns) * self.per_minute)
        self._at_ns = now_ns
