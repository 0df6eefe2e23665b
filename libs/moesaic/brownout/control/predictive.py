"""Thresholds by predicted latencies: fall at once and far enough, rise slowly when it is safe. Pure.

Latencies are predicted for every pair of thresholds, in steps of a tenth. Inputs are the queue, the
arriving prompts and the times of steps.

* TTFT is the largest of three: the wait behind all prompts and requests in the queue, the same
  after some time at this arrival rate, and the queue's age.
* TPOT is the 90th percentile of steps with as many rows as recent steps had and the queue will need.
* Both are also predicted for the steady state of a queue with this arrival rate. This counts for a
  rise, and for a fall once places in steps are short.

==========================================  =====================================================
The pair in force                           Then
==========================================  =====================================================
would miss a target less ``MARGINS``        the highest lower pair that meets them; if there is
                                            none, the highest of those that come closest
could be higher, by far, for ``CALM_S``     rises by ``RISE``, and ``RISE_EVERY_S`` later again; after
                                            rises in vain it waits for longer
otherwise                                   stays
==========================================  =====================================================

"By far" means a longer look ahead and a wider margin, so that noise around a target changes nothing.
Of pairs that come equally close, the highest is taken.

If lowering a phase's threshold was measured to gain nothing, the phase stays exact until that evidence
has aged. If a target is missed meanwhile, a lower threshold is tried for ``TRIAL_S``, after a pause
that doubles. A target that a lone request would miss at the lowest thresholds is ignored: degrading
others would not help it.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from moesaic.brownout.control.contract import PHASES, Phase, QueueState, StepTaken, Thresholds
from moesaic.brownout.control.grid import Array, Demand, Place, ThresholdGrid
from moesaic.brownout.control.latencies import LatencyWindow, percentile_90
from moesaic.brownout.control.speed import StepSpeed
from moesaic.messages.brownout import BrownoutPolicy

ARRIVALS_S = 2.0  # in which arrivals count
LASTING_S = 3.0  # in which they count for a steady state
ANSWER_PART = 0.05  # of an answer, in what is usual


class FadingRate:
    """An amount per second; older amounts count less."""

    def __init__(self, seconds: float) -> None:
        """Decay the amount by the ``seconds`` that have passed."""
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
        """Return the amount per second."""
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
        tokens: prompt tokens that arrived recently.
        requests: requests that arrived recently.
        prompt_tokens: mean tokens of a prompt.
        answer_tokens: mean tokens of an answer; 0 before any has ended.
        answer_variance: variance of the tokens of an answer.
        computed: share of prompt tokens whose KV is not cached.
    """

    def __init__(self) -> None:
        self.tokens, self.requests = FadingRate(ARRIVALS_S), FadingRate(ARRIVALS_S)
        self._lasting = FadingRate(LASTING_S)
        self._num_ended = 0
        self.prompt_tokens, self.computed = 0.0, 1.0
        self.answer_tokens = self.answer_variance = 0.0

    def add(self, now_s: float, tokens: int) -> None:
        """Record a request by the tokens of its prompt."""
        self.tokens.add(now_s, tokens)
        self.requests.add(now_s, 1)
        self._lasting.add(now_s, 1)
        self.prompt_tokens += (0.1 if self.prompt_tokens else 1.0) * (tokens - self.prompt_tokens)

    def lasting_per_s(self, now_s: float) -> float:
        """Return a lower bound of the requests per second, over a longer time.

        The bound is one standard deviation below the count, which chance may have raised.
        """
        per_s = self._lasting.per_s(now_s)
        return max(0.0, per_s - math.sqrt(per_s / (2 * LASTING_S)))

    def began(self, tokens: int, cached: int) -> None:
        """Record a prompt's tokens, and those whose KV was cached."""
        self.computed += 0.05 * (1 - cached / max(1, tokens) - self.computed)

    def ended(self, tokens: int) -> None:
        """Record the tokens of an answer that has ended."""
        self._num_ended += 1
        part, off = max(ANSWER_PART, 1 / self._num_ended), max(1, tokens) - self.answer_tokens
        # Of the first answers the mean, and what they differ from it.
        self.answer_variance += part * ((1 - part) * off**2 - self.answer_variance)
        self.answer_tokens += part * off


STEP = 0.1  # between thresholds
# Parts of the targets of TTFT and TPOT. A burst that is noticed late costs first tokens, so their margin is wider.
MARGINS, CALM_MARGINS = (0.8, 0.9), (0.65, 0.85)
FREE_PART = 0.4  # of places: while more are free, a steady state that would be too slow is far off
AHEAD_S, CALM_AHEAD_S = 0.5, 3.0  # looks ahead
CALM_S = 1.5, 3.0  # before a rise, and after rises in vain
RISE, RISE_EVERY_S = 0.2, 0.5
IN_VAIN_S = 5.0  # or less from a rise to a fall
WORSE, BETTER = 1.5, 0.9  # times the calm, after a rise in vain and after any
LATE_STEPS = 64
FRESH_S = 1.5  # latencies that may correct a prediction
BIAS_PART, BIAS_FADES_S, MOST_BIAS = 0.1, 10.0, 3.0
MOST_NOISE = 2.0
# At threshold 0. Below the first a phase is not lowered any more, until it has grown to the second.
LEAST_GAIN, TRIED_AGAIN = 1.08, 1.15
TRIAL_S, PAUSES_S = 2.0, (5.0, 160.0)  # first and longest pause from one trial to the next


@dataclass(frozen=True)
class Prediction:
    """A decision with its expected results.

    Attributes:
        thresholds: thresholds from now on.
        ttft_s: predicted 90th percentile at these; ``None``: too little is known.
        tpot_s: likewise.
        wait_s: wait of a request that came now, until its prompt could begin.
        served_s: time from then to its first token.
        at_lowest: a target is missed, and lower thresholds would not help.
        unreachable: phases whose target a lone request misses at the lowest thresholds.
    """

    thresholds: Thresholds
    ttft_s: float | None = None
    tpot_s: float | None = None
    wait_s: float = 0.0
    served_s: float = 0.0
    at_lowest: bool = False
    unreachable: tuple[Phase, ...] = ()


class PredictiveControl:
    """Keeps both thresholds as high as the targets allow."""

    def __init__(
        self, policy: BrownoutPolicy, arrivals: Arrivals, speed: StepSpeed | None = None
    ) -> None:
        """Begin to decide by ``policy``, with the speed that another one has learned."""
        self.speed = speed or StepSpeed()
        self._arrivals = arrivals
        self._targets = policy.slo_ttft_s, policy.slo_tpot_s
        self._levels = _levels(policy.min_prefill_threshold), _levels(policy.min_decode_threshold)
        self._steps: deque[tuple[int, float]] = deque(maxlen=LATE_STEPS)
        self._fill = 1.0  # of what steps may have, the part that prompts got while some waited
        self._backlog = 0
        self._bias = [1.0, 1.0]  # times that latencies were longer than predicted
        self._useful = [True, True]  # lower thresholds, by phase
        self._trial_ends_s = self._tries_next_s = -math.inf
        self._pause_s = PAUSES_S[0]
        self._decided_s: float | None = None
        self._calm_since_s: float | None = None
        self._calm_s = CALM_S[0]
        self._changed_s = self._risen_s = -math.inf
        # Since then each latency has been predicted to be below its target.
        self._fine_since_s = [-math.inf, -math.inf]

    def stepped(self, step: StepTaken, step_rows: int) -> None:
        """Record a step that had room for ``step_rows`` of prompts."""
        expected = self.speed.seconds(step.prompt_rows, step.answer_rows, step.thresholds)
        if self.speed.is_known and expected > 0:
            self._steps.append((step.prompt_rows, step.seconds / expected))
        self.speed.took(step)
        if wanted := min(self._backlog, step_rows):
            self._fill += 0.1 * (min(1.0, step.prompt_rows / wanted) - self._fill)
            self._backlog -= min(self._backlog, step.prompt_rows)

    def decide(
        self,
        state: QueueState,
        current: Thresholds,
        windows: dict[Phase, LatencyWindow],
    ) -> Prediction:
        """Decide about both thresholds.

        Args:
            state: state of the engine now.
            current: thresholds in force.
            windows: latencies of each phase.
        """
        self._backlog = state.waiting_tokens
        # Whatever there was to fear is over.
        if state.idle_s >= CALM_S[0]:
            current, self._bias = Thresholds(*(levels[0] for levels in self._levels)), [1.0, 1.0]
        if not self.speed.is_known:
            return Prediction(current)
        grid = ThresholdGrid(self.speed, self._demand(state), self._levels, current)
        here = grid.here
        self._correct(state.now_s, grid, windows)
        reached = tuple(a <= b for a, b in zip(grid.lone_s(), self._targets, strict=True))
        is_crowded = state.free_places <= FREE_PART * state.places
        load = self._load(grid, AHEAD_S, MARGINS, reached, steady=is_crowded)
        place = here
        if load[here] > 1:
            self._calm_since_s = None
            place = grid.best(load, here)
            if place != here and state.now_s - self._risen_s < IN_VAIN_S:
                self._calm_s, self._risen_s = min(CALM_S[1], self._calm_s * WORSE), -math.inf
        elif here != (0, 0):
            calm = self._load(grid, CALM_AHEAD_S, CALM_MARGINS, reached, steady=True)
            place = self._risen(state.now_s, here, calm)
        self._useful = [
            gain >= (LEAST_GAIN if useful else TRIED_AGAIN)
            for gain, useful in zip(self.speed.gains, self._useful, strict=True)
        ]
        if not self._tries(state.now_s, missed=bool(load[here] > 1)):
            place = place[0] * self._useful[0], place[1] * self._useful[1]
        if place != here:
            self._changed_s = state.now_s
        return Prediction(
            current if place == here else grid.pair(place),
            float(grid.ttft_s(AHEAD_S)[place] * self._bias[0]),
            float(grid.tpot_s[place] * self._bias[1]),
            float(grid.wait_s[place]),
            float(grid.served_s[place]),
            at_lowest=bool(load[place] > 1),
            unreachable=tuple(p for p, ok in zip(PHASES, reached, strict=True) if not ok),
        )

    def _tries(self, now_s: float, *, missed: bool) -> bool:
        """True while a phase is lowered although that was measured to gain nothing."""
        if all(self._useful):
            self._tries_next_s, self._pause_s = now_s + PAUSES_S[0], PAUSES_S[0]
        elif missed and now_s >= self._tries_next_s:
            self.speed.doubt()
            self._trial_ends_s, self._tries_next_s = now_s + TRIAL_S, now_s + self._pause_s
            self._pause_s = min(PAUSES_S[1], 2 * self._pause_s)
        return now_s < self._trial_ends_s

    def _demand(self, state: QueueState) -> Demand:
        arriving = self._arrivals.tokens.per_s(state.now_s)
        # A request that waits for other reasons than the queue says nothing about it.
        by_rate_s = state.waiting_tokens / arriving if arriving else 0.0
        noise = percentile_90(slower for _, slower in self._steps) or 1.0
        computed = self._arrivals.computed
        return Demand(
            backlog_rows=state.waiting_tokens * computed,
            queue_age_s=min(state.oldest_wait_s, by_rate_s),
            arriving_rows_per_s=arriving * computed,
            prompt_rows=max(1.0, self._arrivals.prompt_tokens * computed),
            step_rows=max(1.0, state.step_rows * self._fill),
            answers=state.answers,
            lacking_places=state.waiting_requests - state.free_places,
            places=state.places,
            requests_per_s=self._arrivals.requests.per_s(state.now_s),
            lasting_requests_per_s=self._arrivals.lasting_per_s(state.now_s),
            answer_tokens=self._arrivals.answer_tokens,
            answer_variance=self._arrivals.answer_variance,
            late_rows=[rows for rows, _ in self._steps],
            noise=min(MOST_NOISE, max(1.0, noise)),
        )

    def _load(
        self,
        grid: ThresholdGrid,
        ahead_s: float,
        margins: tuple[float, float],
        reached: tuple[bool, ...],
        *,
        steady: bool,
    ) -> Array:
        """The larger of both latencies, as a share of its target less the margin, by pair."""
        found = np.zeros_like(grid.wait_s)
        soon_s = grid.ttft_s(ahead_s), grid.tpot_s
        lasting_s = grid.steady_ttft_s, grid.steady_tpot_s
        for i in range(len(PHASES)):
            predicted_s = np.maximum(soon_s[i], lasting_s[i]) if steady else soon_s[i]
            if reached[i]:
                share = predicted_s * self._bias[i] / (self._targets[i] * margins[i])
                found = np.maximum(found, share)
        return found

    def _risen(self, now_s: float, here: Place, calm: Array) -> Place:
        """Return the place of higher thresholds once these would have met the targets long enough; else ``here``."""
        rise = round(RISE / STEP)
        wanted = max(0, here[0] - rise), max(0, here[1] - rise)
        options = [wanted, (here[0], wanted[1]), (wanted[0], here[1])]
        options += [(max(0, here[0] - 1), max(0, here[1] - 1))]
        found = next((place for place in options if place != here and calm[place] <= 1), None)
        if found is None:
            self._calm_since_s = None
            return here
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        is_calm = now_s - self._calm_since_s >= self._calm_s
        if not is_calm or now_s - self._changed_s < RISE_EVERY_S:
            return here
        self._risen_s, self._calm_s = now_s, max(CALM_S[0], self._calm_s * BETTER)
        return found

    def _correct(
        self, now_s: float, grid: ThresholdGrid, windows: dict[Phase, LatencyWindow]
    ) -> None:
        """Correct predictions by latencies that exceed a target and were predicted to meet it.

        Requests that began before that prediction, or at other thresholds, do not count.
        """
        passed_s = now_s - (self._decided_s if self._decided_s is not None else now_s)
        self._decided_s = now_s
        predicted_s = grid.ttft_s(0.0)[grid.here], grid.tpot_s[grid.here]
        for i, phase in enumerate(PHASES):
            self._bias[i] = 1 + (self._bias[i] - 1) * math.exp(-passed_s / BIAS_FADES_S)
            expected = predicted_s[i] * self._bias[i] / self._targets[i]
            if expected >= 1:
                self._fine_since_s[i] = now_s
            since_s = max(self._fine_since_s[i], self._changed_s, now_s - FRESH_S)
            share = windows[phase].p90_share(now_s, begun_since_s=since_s)
            if share is not None and share > 1 > expected > 0:
                corrected = self._bias[i] * (share / expected) ** BIAS_PART
                self._bias[i] = min(MOST_BIAS, corrected)


def _levels(least: float) -> list[float]:
    """Thresholds from 1 down to ``least``."""
    above = (round(1 - STEP * i, 9) for i in range(math.ceil((1 - least) / STEP)))
    return [*(level for level in above if level > least), least]
