"""The choice among ways to compute a step, by the times that they took lately. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

Way = TypeVar("Way")

TRIALS = 3  # of every way, before any is the fastest
REMEMBERED = 7  # times of a way; their median is not moved by a step that was disturbed
RETRY_EVERY = 32  # steps: neighbours come and go


@dataclass
class _Times:
    """Times of ways, for steps of about as many rows."""

    by_way: list[deque[float]]
    steps: int = 0
    fastest: int = 0


class FastestWay(Generic[Way]):
    """Finds the fastest of some ways, for each size of steps apart, and looks again now and then."""

    def __init__(self, ways: Sequence[Way]) -> None:
        """Choose among ``ways``, one at least; the first ones are preferred until times are known."""
        assert ways
        self.ways = tuple(ways)
        self._by_size: dict[int, _Times] = {}

    def choose(self, num_rows: int) -> Way:
        """The way for the next step of so many rows."""
        times = self._times(num_rows)
        if len(self.ways) == 1:
            return self.ways[0]
        tried = [len(each) for each in times.by_way]
        if min(tried) < TRIALS:
            return self.ways[tried.index(min(tried))]
        times.steps += 1
        if times.steps % RETRY_EVERY:
            return self.ways[times.fastest]
        return self.ways[times.steps // RETRY_EVERY % len(self.ways)]

    def took(self, way: Way, num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        times = self._times(num_rows)
        times.by_way[self.ways.index(way)].append(seconds / num_rows)
        if all(times.by_way):
            medians = [median(each) for each in times.by_way]
            times.fastest = medians.index(min(medians))

    def _times(self, num_rows: int) -> _Times:
        size = num_rows.bit_length()
        if size not in self._by_size:
            self._by_size[size] = _Times([deque(maxlen=REMEMBERED) for _ in self.ways])
        return self._by_size[size]
