"""Which way is faster? What slots of trials took in, a verdict with its confidence out. Pure.

Ways are compared within one sweep of a trial, one beside the other, so that what else happens on the
machines is common to both; every sweep gives one ratio. One way counts as faster than another once
Student's t says so of these ratios, or once there are many and their mean says so.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from moesaic.dispatch.exchange.costs import Case
from moesaic.dispatch.exchange.trials import Slot

KEPT = 12  # sweeps: an older one says nothing any more
_LEAST_EXCHANGES = 2  # of a way in a sweep
_LEAST_SWEEPS = 3
_ALIKE = 0.03  # of the duration: nobody is slower by less
# Two-sided 95 % by degrees of freedom, from 2 on.
_STUDENT = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)


@dataclass(frozen=True)
class Ratio:
    """How much longer one way takes than another: natural logarithms."""

    mean: float
    error: float  # the true value is within it with 95 % confidence
    sweeps: int

    @property
    def is_faster(self) -> bool:
        """Whether the first way is: surely, or as far as many sweeps can tell."""
        many = self.sweeps >= KEPT and self.mean < -_ALIKE
        return self.mean + self.error < 0 or many

    @property
    def is_settled(self) -> bool:
        """Whether more sweeps would hardly change the verdict."""
        apart = abs(self.mean) > self.error
        alike = abs(self.mean) + self.error < 2 * _ALIKE
        return apart or alike or self.sweeps >= KEPT


class Evidence:
    """What trials have shown of one kind of exchange."""

    def __init__(self) -> None:
        self._sweeps: deque[dict[Case, float]] = deque(maxlen=KEPT)  # logarithms of seconds
        self._sweep: object = None  # that is under way
        self._found: dict[Case, list[float]] = {}

    def add(self, slot: Slot, seconds: float) -> None:
        """Note what an exchange took in ``slot``, having gone its way."""
        if slot.sweep != self._sweep:
            self.finish()
            self._sweep = slot.sweep
        self._found.setdefault(slot.case, []).append(math.log(max(seconds, 1e-9)))

    def finish(self) -> None:
        """The sweep is over."""
        means = {
            case: sum(found) / len(found)
            for case, found in self._found.items()
            if len(found) >= _LEAST_EXCHANGES
        }
        if len(means) > 1:
            self._sweeps.append(means)
        self._sweep, self._found = None, {}

    def ratio(self, case: Case, other: Case) -> Ratio | None:
        """``case`` beside ``other``; ``None`` where too little is known."""
        ratios = [s[case] - s[other] for s in self._sweeps if case in s and other in s]
        num = len(ratios)
        if num < _LEAST_SWEEPS:
            return None
        mean = sum(ratios) / num
        variance = sum((ratio - mean) ** 2 for ratio in ratios) / (num - 1)
        return Ratio(mean, _STUDENT[num - 3] * math.sqrt(variance / num), num)

    def best(self, first: Case, cases: Collection[Case]) -> Case:
        """``first``, unless another way is faster; then the fastest."""
        known = {case: self.ratio(case, first) for case in cases if case != first}
        faster = {case: r.mean for case, r in known.items() if r is not None and r.is_faster}
        return min(faster, key=faster.__getitem__) if faster else first

    def is_settled(self, best: Case, cases: Collection[Case]) -> bool:
        """Whether ``best`` is known to be the fastest of ``cases``, or as fast as any."""
        ratios = [self.ratio(case, best) for case in cases if case != best]
        return all(ratio is not None and ratio.is_settled for ratio in ratios)
