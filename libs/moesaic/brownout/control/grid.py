"""Predicted latencies at every pair of thresholds, and the choice among pairs. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.brownout.control.contract import Thresholds
from moesaic.brownout.control.speed import StepSpeed

CLOSE = 0.02  # pairs that miss by so much more than the best one are as good
MOST_USED = 0.999  # of what steps can do, in a steady state
LEAST_WORTH = 0.05  # of a phase with hardly any rows, among pairs that are equally good

Array = NDArray[np.float64]
Place = tuple[int, int]
"""Indices of the levels of prefill and of decode."""


@dataclass(frozen=True)
class Demand:
    """The work that is waiting, and the work that arrives.

    Attributes:
        backlog_rows: prompt rows that wait.
        queue_age_s: wait of the oldest request, as far as the queue explains it.
        arriving_rows_per_s: prompt rows that arrive.
        prompt_rows: mean rows of a prompt.
        step_rows: prompt rows that a step computes while some wait.
        answers: generations that get a token in each step.
        lacking_places: requests without a place in steps, less the free places; negative: places are free.
        places: most requests with rows in one step.
        requests_per_s: requests that arrived recently.
        lasting_requests_per_s: the same over a longer time.
        answer_tokens: mean tokens of an answer; 0: unknown.
        answer_variance: variance of the tokens of an answer.
        late_rows: prompt rows of the last steps.
        noise: 90th percentile of a step's duration over its prediction; at least 1.
    """

    backlog_rows: float
    queue_age_s: float
    arriving_rows_per_s: float
    prompt_rows: float
    step_rows: float
    answers: int
    lacking_places: int
    places: int
    requests_per_s: float
    lasting_requests_per_s: float
    answer_tokens: float
    answer_variance: float
    late_rows: Sequence[int]
    noise: float


class ThresholdGrid:
    """Predictions for each pair of levels; arrays are float64 ``[levels of prefill, levels of decode]``.

    Attributes:
        here: indices of the thresholds in force.
        wait_s: wait of a request that came now, until its prompt could begin.
        served_s: time from then to its first token.
        tpot_s: 90th percentile of TPOT.
        steady_ttft_s: 90th percentile of TTFT at the arrival rate of a longer time; 0: unknown.
        steady_tpot_s: the same for TPOT.
    """

    def __init__(
        self,
        speed: StepSpeed,
        demand: Demand,
        levels: tuple[Sequence[float], Sequence[float]],
        current: Thresholds,
    ) -> None:
        """Predict; ``levels`` are the thresholds of each phase from the highest on, ``current`` those in force."""
        self._speed, self._demand, self._levels = speed, demand, levels
        self.here = self._place_of(current)
        self._factors = [
            np.array([speed.factor(phase, level) for level in levels[phase]]) for phase in (0, 1)
        ]
        self._full_step_s = self._seconds(demand.step_rows, demand.answers)
        self._each_s = self._request_s()
        # Requests come in the middle of a step.
        self.served_s = 1.5 * self._seconds(demand.prompt_rows, demand.answers)
        self.wait_s = self._wait_s()
        self.tpot_s = self._tpot_s()
        self.steady_ttft_s, self.steady_tpot_s = self._steady()

    def ttft_s(self, ahead_s: float) -> Array:
        """Predict the 90th percentile of first tokens, of requests that come within ``ahead_s`` too."""
        demand = self._demand
        rate = demand.step_rows / self._full_step_s
        grown = demand.backlog_rows + (demand.arriving_rows_per_s - rate) * ahead_s
        later_s = self._drained_s(np.maximum(0.0, grown))
        come = demand.lacking_places + demand.requests_per_s * ahead_s
        later_s = np.maximum(later_s, come * self._each_s - ahead_s)
        found: Array = np.maximum(self.wait_s, later_s) + self.served_s
        return found

    def lone_s(self) -> tuple[float, float]:
        """Predict TTFT and TPOT of a lone request at the lowest thresholds."""
        first = self._seconds(self._demand.prompt_rows, 0)[-1, -1]
        return float(first), float(self._seconds(0, 1)[-1, -1])

    def pair(self, place: Place) -> Thresholds:
        """Return the thresholds at a place."""
        return Thresholds(self._levels[0][place[0]], self._levels[1][place[1]])

    def best(self, load: Array, not_above: Place) -> Place:
        """Choose a pair by the largest share of a target, less its margin, that each one has.

        Returns:
            The highest pair, not above ``not_above``, whose ``load`` is at most 1; if there is none,
            the highest of those that come closest to it.
        """
        lower = np.full(load.shape, np.inf)
        lower[not_above[0] :, not_above[1] :] = load[not_above[0] :, not_above[1] :]
        least = lower.min()
        fitting = lower <= (1.0 if least <= 1 else least * (1 + CLOSE))
        worth = np.where(fitting, self._worth(), -np.inf)
        prefill, decode = np.unravel_index(int(worth.argmax()), worth.shape)
        return int(prefill), int(decode)

    def _place_of(self, at: Thresholds) -> Place:
        """Find the levels that are closest to thresholds."""
        prefill, decode = (
            min(range(len(levels)), key=lambda i: abs(levels[i] - threshold))
            for levels, threshold in zip(self._levels, at, strict=True)
        )
        return prefill, decode

    def _worth(self) -> Array:
        """Value of pairs: thresholds, weighted by the rows that they are for."""
        prompts, answers = sum(self._demand.late_rows), self._demand.answers
        of_prompts = prompts / max(1, prompts + answers * len(self._demand.late_rows))
        return np.add.outer(
            (of_prompts + LEAST_WORTH) * np.array(self._levels[0]),
            (1 - of_prompts + LEAST_WORTH) * np.array(self._levels[1]),
        )

    def _seconds(self, prompt_rows: float, answer_rows: float) -> Array:
        prefill, decode = self._speed.parts(prompt_rows, answer_rows).of_phases
        return self._at_pairs(prefill, decode)

    def _at_pairs(self, prefill: float, decode: float) -> Array:
        """Time of what exact phases take ``prefill`` and ``decode`` for."""
        return np.add.outer(prefill / self._factors[0], decode / self._factors[1])

    def _wait_s(self) -> Array:
        demand = self._demand
        drained_s = self._drained_s(np.full(self._full_step_s.shape, demand.backlog_rows))
        placed_s = max(0, demand.lacking_places) * self._each_s
        # In a queue that neither grows nor shrinks, newcomers wait for as long as the oldest has.
        as_long_s = demand.queue_age_s * self._full_step_s / self._full_step_s[self.here]
        found: Array = np.maximum(np.maximum(drained_s, placed_s), as_long_s)
        return found

    def _request_s(self) -> Array:
        """Mean time between the ends of two requests, while every place in steps is taken.

        Zeros while nothing is known of answers.
        """
        demand = self._demand
        if not demand.answer_tokens:
            return np.zeros_like(self._full_step_s)
        ends = self._most_ends_of_a_step()
        step_s = self._seconds(ends * demand.prompt_rows, ends * (demand.answer_tokens - 1))
        return step_s / ends

    def _most_ends_of_a_step(self) -> float:
        """Requests that begin and end in a full step, which has one row for each later token of an answer."""
        demand = self._demand
        by_places = demand.places / demand.answer_tokens
        return min(by_places, demand.step_rows / demand.prompt_rows)

    def _steady(self) -> tuple[Array, Array]:
        """Predict the 90th percentiles of TTFT and TPOT at the arrival rate of a longer time.

        The engine is a queue with several servers. By Sakasegawa's approximation a request waits with
        probability ``used ** (sqrt(2 * (places + 1)) - 1)``. Its wait is exponentially distributed; by Allen
        and Cunneen, it is shorter if answers differ less in length.
        """
        demand, each_s = self._demand, self._each_s
        if not demand.answer_tokens or not demand.lasting_requests_per_s:
            return np.zeros_like(each_s), np.zeros_like(each_s)
        per_s, ends = demand.lasting_requests_per_s, self._most_ends_of_a_step()
        used = np.minimum(per_s * each_s, MOST_USED)
        waits = used ** (math.sqrt(2 * (ends * demand.answer_tokens + 1)) - 1)
        spread = (1 + demand.answer_variance / demand.answer_tokens**2) / 2
        wait_s = np.log(np.maximum(1.0, 10 * waits)) * spread * each_s / (1 - used)
        # A step has the rows of the requests that come while it takes.
        later_tokens = demand.answer_tokens - 1
        parts = self._speed.parts(per_s * demand.prompt_rows, per_s * later_tokens)
        prefill, decode = parts.of_phases
        busy = self._at_pairs(parts.prompts, parts.answers)
        own_s = self._at_pairs(prefill - parts.prompts, decode - parts.answers)
        step_s = np.minimum(own_s / (1 - np.minimum(busy, MOST_USED)), ends * each_s)
        return wait_s + self.served_s, step_s * demand.noise

    def _drained_s(self, rows: Array) -> Array:
        """Time to compute these rows of prompts, in whole steps."""
        row_s = (self._speed.parts(1, 0).prompts / self._factors[0])[:, None]
        # Of each step, rows aside.
        rest_s = self._full_step_s - self._demand.step_rows * row_s
        steps = np.maximum(1.0, rows / self._demand.step_rows)
        return np.where(rows > 0, steps * rest_s + rows * row_s, 0.0)

    def _tpot_s(self) -> Array:
        demand = self._demand
        rows = sorted(demand.late_rows)
        at_90 = rows[max(0, -(-9 * len(rows) // 10) - 1)] if rows else 0
        usual_s = self._seconds(at_90, demand.answers)
        if demand.backlog_rows < demand.step_rows * max(1.0, 0.1 * len(rows)):
            return usual_s * demand.noise
        return np.maximum(usual_s, self._full_step_s) * demand.noise
