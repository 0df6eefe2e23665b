"""Sides measured in turns, and what is said of the turns: their median and range, and ratios within a turn.

A machine's speed drifts. So sides are measured one right after the other, in an order that changes from turn to turn,
and a ratio is of two measurements of one turn. A turn during which the machine's speed changed can be repeated.
"""

import statistics
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from moesaic.cli.machine.facts import gemm_gflops

DRIFT = 0.1  # of the machine's speed within a turn, as a part of it

T = TypeVar("T")


def in_turn(sides: Iterable[T], turn: int) -> list[T]:
    """Order the sides for a turn: forwards, then backwards (ABBA), so that drift meets all alike."""
    ordered = list(sides)
    return ordered[::-1] if turn % 2 else ordered


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Report the median of turns and their range; there must be a turn."""
    found = list(values)
    return {
        "median": round(statistics.median(found), digits),
        "least": round(min(found), digits),
        "most": round(max(found), digits),
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Divide turn by turn.

    Raises:
        ValueError: one side has more turns than the other.
    """
    return [a / b for a, b in zip(ours, theirs, strict=True)]


@dataclass
class SteadyTurns:
    """Repeats turns during which this machine's speed changed by more than ``DRIFT``, once each.

    Attributes:
        most_repeated: turns that are repeated at most.
        gemm_gflops: speed of a fixed product before and after each turn that counts.
        num_repeated: turns that were repeated.
    """

    most_repeated: int
    gemm_gflops: list[float] = field(default_factory=list)
    num_repeated: int = 0

    async def take(self, turn: Callable[[int], Awaitable[T]]) -> T:
        """Run ``turn(attempt)``, again if the speed changed; return what the last attempt did."""
        for attempt in (0, 1):
            before = gemm_gflops()
            found = await turn(attempt)
            after = gemm_gflops()
            is_last = attempt or self.num_repeated >= self.most_repeated
            if is_last or abs(after / before - 1) <= DRIFT:
                break
            self.num_repeated += 1
        self.gemm_gflops += [before, after]
        return found
