"""The loop of a simulation: actions at times, earliest first, those of one time in the order they were planned."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

from moesaic.errors import InvalidInput

Action = Callable[[int], None]
Progress = Callable[[float], None]  # with the time that was reached, in seconds
TELL_EVERY = 4096  # actions


class EventLoop:
    """Carries out actions in the order of their times. No clock: time is the next action's.

    Attributes:
        now_s: time of the action under way.
        num_actions: that were carried out.
    """

    __slots__ = ("_heap", "_number", "now_s", "num_actions")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_actions = 0
        self._heap: list[tuple[float, int, Action, int]] = []
        self._number = 0

    def at(self, time_s: float, action: Action, argument: int = 0) -> None:
        """Have ``action(argument)`` carried out at ``time_s``.

        Raises:
            InvalidInput: the time is over.
        """
        if not time_s >= self.now_s:
            raise InvalidInput("time_s", f"must be at least {self.now_s:g}, got {time_s:g}")
        self._number = number = self._number + 1
        heappush(self._heap, (time_s, number, action, argument))

    def after(self, delay_s: float, action: Action, argument: int = 0) -> None:
        """Have ``action(argument)`` carried out in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, action, argument)

    @property
    def next_s(self) -> float:
        """Time of the next action; endless if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def run(self, until_s: float = math.inf, progress: Progress | None = None) -> None:
        """Carry out all actions up to and at ``until_s``, and those that they plan.

        Args:
            until_s: the time is this afterwards, unless it is endless.
            progress: told the time now and then.
        """
        heap, number = self._heap, 0
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action, argument = heappop(heap)
            action(argument)
            number += 1
            if progress is not None and not number % TELL_EVERY:
                progress(self.now_s)
        self.num_actions += number
        if until_s < math.inf:
            self.now_s = until_s
        if progress is not None:
            progress(self.now_s)
