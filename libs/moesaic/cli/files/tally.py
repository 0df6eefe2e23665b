"""Counts of a classifier's right and wrong answers; pure."""

import math
from dataclasses import dataclass, field

Z_95 = 1.959964


@dataclass
class LabelCount:
    """One label's part of a tally."""

    rows: int = 0  # rows whose true label this is
    predicted: int = 0
    correct: int = 0


@dataclass
class RowsTally:
    """Counts over classified rows."""

    answered: int = 0
    errors: int = 0
    judged: int = 0  # answered rows whose true label is known
    correct: int = 0
    labels: dict[str, LabelCount] = field(default_factory=dict)

    def add(self, predicted: str, truth: str | None) -> None:
        """Count one answer."""
        self.answered += 1
        if truth is None:
            return
        right = predicted == truth
        self.judged += 1
        self.correct += right
        self.labels.setdefault(truth, LabelCount()).rows += 1
        self.labels.setdefault(predicted, LabelCount()).predicted += 1
        self.labels[truth].correct += right

    @property
    def accuracy(self) -> float | None:
        """Fraction of right answers among those that can be judged; None if there are none."""
        return self.correct / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy (Wilson's score interval); None without accuracy."""
        if self.accuracy is None:
            return None
        rate, count, square = self.accuracy, self.judged, Z_95**2
        middle = (rate + square / (2 * count)) / (1 + square / count)
        half = (
            Z_95
            * math.sqrt(rate * (1 - rate) / count + square / (4 * count**2))
            / (1 + square / count)
        )
        return max(0.0, middle - half), min(1.0, middle + half)
