"""Expected lengths of answers, from those before: most end long before they may."""

import math

WEIGHT = 1 / 32  # of the newest answer


class AnswerLengths:
    """A moving average of the lengths of answers, in tokens."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def add(self, num_tokens: int) -> None:
        """Note the length of an answer that has ended."""
        mean = num_tokens if self._mean is None else self._mean
        self._mean = mean + WEIGHT * (num_tokens - mean)

    def expected(self, max_tokens: int) -> int:
        """Expect a length of an answer that may have ``max_tokens``; at least 1."""
        mean = max_tokens if self._mean is None else math.ceil(self._mean)
        return max(1, min(max_tokens, mean))
