"""The choice among ways to compute a step, by the times that they took lately. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any, Generic, TypeVar

Way = TypeVar("Way", bound=Any)

TRIALS = 3  # of each way that may be the fastest
REMEMBERED = 7  # times of a way; their median is not moved by a step that was disturbed
RETRY_EVERY = 32  # steps: neighbours come and go
HOPELESS = 1.25  # times as long as the fastest: more trials would only cost


@dataclass
class _Times:
    """Times of ways, for steps of about as many rows."""

    by_way: list[deque[float]]
    fastest: int
    steps: int = 0


class FastestWay(Generic[Way]):
    """Finds the fastest of some ways, for each size of steps apart, and looks again now and then.

    Trials cost what slow ways take, so only those next to the fastest are tried: the ones that differ from it
    in one field.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        """Choose among ``ways``, dataclasses of one kind, one at least; the first is tried first."""
        assert ways
        self.ways = tuple(ways)
        fields = [astuple(way) for way in self.ways]
        self._next_to = [
            [j for j, b in enumerate(fields) if sum(x != y for x, y in zip(a, b, strict=True)) == 1]
            for a in fields
        ]
        self._by_size: dict[int, _Times] = {}

    def choose(self, num_rows: int) -> Way:
        """The way for the next step of so many rows."""
        times = self._times(num_rows)
        near = self._next_to[times.fastest]
        untried = [
            way
            for way in (times.fastest, *near)
            if len(times.by_way[way]) < TRIALS and not _is_hopeless(times, way)
        ]
        if untried:
            return self.ways[min(untried, key=lambda way: len(times.by_way[way]))]
        times.steps += 1
        if near and times.steps % RETRY_EVERY == 0:
            return self.ways[near[times.steps // RETRY_EVERY % len(near)]]
        return self.ways[times.fastest]

    def took(self, way: Way, num_rows: int, seconds: float) -> None:
        """Learn from a step."""
        times = self._times(num_rows)
        times.by_way[self.ways.index(way)].append(seconds / num_rows)
        medians = [median(each) if each else math.inf for each in times.by_way]
        times.fastest = medians.index(min(medians))

    def _times(self, num_rows: int) -> _Times:
        size = round(math.log2(num_rows))  # steps of full batches are powers of two, or about
        if size not in self._by_size:
            nearest = min(self._by_size, key=lambda other: abs(other - size), default=None)
            first = 0 if nearest is None else self._by_size[nearest].fastest
            self._by_size[size] = _Times([deque(maxlen=REMEMBERED) for _ in self.ways], first)
        return self._by_size[size]


def _is_hopeless(times: _Times, way: int) -> bool:
    tried, fastest = times.by_way[way], times.by_way[times.fastest]
    return bool(tried) and min(tried) > HOPELESS * median(fastest)
