"""The rate and the size of requests that arrive. Pure."""

import math

ARRIVALS_S = 2.0  # in which arrivals count
LASTING_S = 3.0  # in which they count for a steady state
ANSWER_PART = 0.05  # of an answer, in what is usual


class FadingRate:
    """An amount per second, older amounts counting less."""

    def __init__(self, seconds: float) -> None:
        """Let an amount count for the less, the more of ``seconds`` have passed."""
        self._seconds = seconds
        self._amount, self._until_s = 0.0, 0.0
        self._begun_s: float | None = None

    def add(self, now_s: float, amount: float) -> None:
        """Take note of an amount."""
        if self._begun_s is None:
            self._begun_s = now_s
        self._amount = self._amount * self._fading(now_s) + amount
        self._until_s = now_s

    def per_s(self, now_s: float) -> float:
        """Return the amount each second."""
        if self._begun_s is None:
            return 0.0
        # The first amounts must not count as if there had been none for long.
        whole = 1 - math.exp(-max(0.5, now_s - self._begun_s) / self._seconds)
        return self._amount * self._fading(now_s) / (self._seconds * whole)

    def _fading(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._until_s) / self._seconds)


class Arrivals:
    """The requests that arrive.

    Attributes:
        tokens: of prompts, of late.
        requests: of late.
        prompt_tokens: of a usual prompt.
        answer_tokens: of a usual answer; 0 before any has ended.
        answer_variance: of these tokens.
        computed: part of prompts whose KV is not there already.
    """

    def __init__(self) -> None:
        self.tokens, self.requests = FadingRate(ARRIVALS_S), FadingRate(ARRIVALS_S)
        self._lasting = FadingRate(LASTING_S)
        self._num_ended = 0
        self.prompt_tokens, self.computed = 0.0, 1.0
        self.answer_tokens = self.answer_variance = 0.0

    def add(self, now_s: float, tokens: int) -> None:
        """Take note of a request with so many tokens in its prompt."""
        self.tokens.add(now_s, tokens)
        self.requests.add(now_s, 1)
        self._lasting.add(now_s, 1)
        self.prompt_tokens += (0.1 if self.prompt_tokens else 1.0) * (tokens - self.prompt_tokens)

    def lasting_per_s(self, now_s: float) -> float:
        """Return the requests that surely arrive each second, of a longer time.

        So many as were counted may come by chance where fewer do: one standard deviation is left out.
        """
        per_s = self._lasting.per_s(now_s)
        return max(0.0, per_s - math.sqrt(per_s / (2 * LASTING_S)))

    def began(self, tokens: int, cached: int) -> None:
        """Take note of a prompt's tokens, and of those whose KV was there already."""
        self.computed += 0.05 * (1 - cached / max(1, tokens) - self.computed)

    def ended(self, tokens: int) -> None:
        """Take note of the tokens of an answer that has ended."""
        self._num_ended += 1
        part, off = max(ANSWER_PART, 1 / self._num_ended), max(1, tokens) - self.answer_tokens
        # Of the first answers the mean, and what they differ from it.
        self.answer_variance += part * ((1 - part) * off**2 - self.answer_variance)
        self.answer_tokens += part * off
