"""Arrivals of requests, recorded or drawn: scaled to a rate, drawn after a curve of rates."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ArrivalTrace:
    """Requests in the order of their arrival.

    Attributes:
        at_s: float64 ``[n]``, seconds since the trace began, ascending.
        prompt_tokens: int64 ``[n]``, at least 1.
        answer_tokens: int64 ``[n]``, at least 1.
        cached_tokens: int64 ``[n]``, of the prompt, that need not be computed.
        span_s: seconds that the trace lasts.
    """

    at_s: Floats
    prompt_tokens: Ints
    answer_tokens: Ints
    cached_tokens: Ints
    span_s: float

    @classmethod
    def of(
        cls,
        at_s: Floats,
        prompt_tokens: Ints,
        answer_tokens: Ints,
        cached_tokens: Ints | None = None,
        span_s: float | None = None,
    ) -> Self:
        """Make a trace of arrays.

        Raises:
            InvalidInput: lengths differ, or times do not ascend from 0.
        """
        times = np.asarray(at_s, np.float64)
        if cached_tokens is None:
            cached_tokens = np.zeros(len(times), np.int64)
        if not len(times) == len(prompt_tokens) == len(answer_tokens) == len(cached_tokens):
            raise InvalidInput("at_s", "must be as long as prompt_tokens and answer_tokens")
        if len(times) and (times[0] < 0 or np.any(np.diff(times) < 0)):
            raise InvalidInput("at_s", "must ascend from 0 or later; sort the requests by time")
        prompts = np.maximum(np.asarray(prompt_tokens, np.int64), 1)
        answers = np.maximum(np.asarray(answer_tokens, np.int64), 1)
        cached = np.clip(np.asarray(cached_tokens, np.int64), 0, prompts - 1)
        last_s = float(times[-1]) if len(times) else 0.0
        return cls(times, prompts, answers, cached, last_s if span_s is None else span_s)

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def requests_per_s(self) -> float:
        """Mean rate."""
        return len(self) / self.span_s if self.span_s > 0 else 0.0

    def faster(self, factor: float) -> Self:
        """Have the same requests come ``factor`` times as dense."""
        if not factor > 0:
            raise InvalidInput("factor", f"must be above 0, got {factor:g}")
        return replace(self, at_s=self.at_s / factor, span_s=self.span_s / factor)

    def at_rate(self, requests_per_s: float) -> Self:
        """Have the same requests come at another mean rate; ups and downs stay."""
        return self.faster(requests_per_s / self.requests_per_s) if len(self) else self

    def at_most(self, prompt_tokens: int, answer_tokens: int) -> Self:
        """Shorten prompts and answers to at most so many tokens."""
        prompts = np.minimum(self.prompt_tokens, prompt_tokens)
        return replace(
            self,
            prompt_tokens=prompts,
            answer_tokens=np.minimum(self.answer_tokens, answer_tokens),
            cached_tokens=np.minimum(self.cached_tokens, prompts - 1),
        )


@dataclass(frozen=True)
class RateCurve:
    """Requests a second over time, constant within each window.

    Attributes:
        per_s: float64 ``[n]``, none negative.
        window_s: seconds of each.
    """

    per_s: Floats
    window_s: float

    @classmethod
    def constant(cls, requests_per_s: float, span_s: float) -> Self:
        """Make a curve of one rate."""
        return cls(np.array([requests_per_s]), span_s)

    @property
    def span_s(self) -> float:
        """Seconds of all windows."""
        return len(self.per_s) * self.window_s

    @property
    def requests_per_s(self) -> float:
        """Mean rate."""
        return float(self.per_s.mean()) if len(self.per_s) else 0.0

    def scaled(self, requests_per_s: float) -> Self:
        """Scale all rates alike, to another mean."""
        return replace(self, per_s=self.per_s * (requests_per_s / self.requests_per_s))

    def window(self, first_s: float, last_s: float) -> Self:
        """Cut out whole windows, from that of ``first_s`` to before that of ``last_s``."""
        first, last = round(first_s / self.window_s), round(last_s / self.window_s)
        return replace(self, per_s=self.per_s[first:last])

    def arrivals(self, lengths: ArrivalTrace, seed: int, gap_cv: float = 1.0) -> ArrivalTrace:
        """Draw arrivals at these rates.

        Gaps are of a Gamma distribution where time runs as fast as the rate; with a ``gap_cv`` of 1 that is a
        Poisson process.

        Args:
            lengths: requests whose tokens are drawn, those of one request together, all as likely.
            seed: the same draws the same arrivals.
            gap_cv: standard deviation of gaps over their mean.

        Raises:
            InvalidInput: a rate is negative, ``gap_cv`` is not above 0, or ``lengths`` is empty.
        """
        if len(self.per_s) and not (np.isfinite(self.per_s).all() and self.per_s.min() >= 0):
            raise InvalidInput("per_s", "must hold rates of 0 or more")
        if not gap_cv > 0:
            raise InvalidInput("gap_cv", f"must be above 0, got {gap_cv:g}")
        if not len(lengths):
            raise InvalidInput("lengths", "must hold requests, to draw their tokens")
        random = np.random.default_rng(seed)
        expected = np.concatenate(([0.0], np.cumsum(self.per_s * self.window_s)))
        due = _renewals(random, float(expected[-1]), gap_cv)
        window = np.clip(np.searchsorted(expected, due, side="right") - 1, 0, len(self.per_s) - 1)
        at_s = window * self.window_s + (due - expected[window]) / self.per_s[window]
        drawn = random.integers(len(lengths), size=len(due))
        return ArrivalTrace.of(
            at_s,
            lengths.prompt_tokens[drawn],
            lengths.answer_tokens[drawn],
            lengths.cached_tokens[drawn],
            self.span_s,
        )


def _renewals(random: np.random.Generator, total: float, gap_cv: float) -> Floats:
    """Draw ascending numbers below ``total``, whose gaps have a mean of 1."""
    shape = 1 / gap_cv**2
    drawn = [np.zeros(1)]
    while drawn[-1][-1] < total:
        missing = total - drawn[-1][-1]
        gaps = random.gamma(shape, 1 / shape, size=int(missing * 1.05) + 64)
        drawn.append(drawn[-1][-1] + np.cumsum(gaps))
    found = np.concatenate(drawn)[1:]
    return found[found < total]
