"""The rate and the size of prompts that arrive. Pure."""

import math

ARRIVALS_S = 2.0  # in which arrivals count


class Arrivals:
    """The prompts that arrive.

    Attributes:
        prompt_tokens: of a usual prompt.
        computed: part of prompts whose KV is not there already.
    """

    def __init__(self) -> None:
        self.prompt_tokens, self.computed = 0.0, 1.0
        self._tokens, self._until_s = 0.0, 0.0  # older ones counting less
        self._begun_s: float | None = None

    def add(self, now_s: float, tokens: int) -> None:
        """Take note of a prompt."""
        if self._begun_s is None:
            self._begun_s, self.prompt_tokens = now_s, tokens
        self._tokens = self._tokens * self._fading(now_s) + tokens
        self._until_s = now_s
        self.prompt_tokens += 0.1 * (tokens - self.prompt_tokens)

    def began(self, tokens: int, cached: int) -> None:
        """Take note of a prompt's tokens, and of those whose KV was there already."""
        self.computed += 0.05 * (1 - cached / max(1, tokens) - self.computed)

    def per_s(self, now_s: float) -> float:
        """Return the tokens that arrive each second, of late."""
        if self._begun_s is None:
            return 0.0
        # The first arrivals must not count as if there had been none for long.
        whole = 1 - math.exp(-max(0.5, now_s - self._begun_s) / ARRIVALS_S)
        return self._tokens * self._fading(now_s) / (ARRIVALS_S * whole)

    def _fading(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._until_s) / ARRIVALS_S)
