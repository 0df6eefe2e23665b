"""ExpertCosts of one worker: what batches of its experts take, as they are answered."""

import threading
from collections import deque

from moesaic.costs import CostBook
from moesaic.experts.without_python import AnswersWithoutPython
from moesaic.messages.performance import FitSums

FORGET = 0.999  # what a batch counts after the next one
MOST_UNTAKEN = 256  # batches that Python answered: the last ones between two looks


class ExpertCosts:
    """Measures batches, and fits their costs when it is asked for them. Any thread may call."""

    def __init__(self) -> None:
        """Know nothing."""
        self._lock, self._book = threading.Lock(), CostBook(FORGET)
        self._untaken: deque[tuple[int, int, float]] = deque(maxlen=MOST_UNTAKEN)
        self._busy_s = 0.0

    def note(self, experts: int, choices: int, seconds: float) -> None:
        """Take note of a batch: experts activated here, their choices, what computing them took."""
        with self._lock:
            self._untaken.append((experts, choices, seconds))
            self._busy_s += seconds

    def note_busy(self, seconds: float) -> None:
        """Take note of time spent on batches that others measure."""
        with self._lock:
            self._busy_s += seconds

    def take(self, answers: AnswersWithoutPython | None) -> tuple[dict[str, FitSums], float]:
        """Fit what came together, that of ``answers`` too.

        Returns:
            All that is known, by part, and the seconds spent on answers since the last call.
        """
        with self._lock:
            samples, busy_s = list(self._untaken), self._busy_s
            self._untaken.clear()
            self._busy_s = 0.0
        samples += answers.take_samples() if answers is not None else []
        for experts, choices, seconds in samples:
            self._book.add("experts", (1, experts, choices), seconds)
        return self._book.sums(), busy_s
