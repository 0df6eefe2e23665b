"""The time of a step by its rows and its thresholds, learned from past steps. Pure.

An exact step takes a constant time, and a time for each row of a prompt and of an answer. The three
are fitted to the last steps; newer ones count more. At threshold ``t`` a phase is ``exp(b * (1 - t))``
times as fast as an exact one. The constant belongs to the phase with more rows.

``b`` is learned from contrasts alone: the first steps after a change of threshold, against what the
steps before it predict. So a machine that slows down for other reasons teaches nothing about
brownout. A contrast counts less if other steps were predicted badly, and not at all before
``LEARNS_AFTER`` steps. Without evidence ``b`` is ``log(1.3)``, and it returns there as evidence ages.
"""

import math
from typing import NamedTuple

from moesaic.brownout.control.contract import EXACT, StepTaken, Thresholds
from moesaic.costs import CostFit

FORGET = 0.985  # what a step counts once another one was measured
KNOWN_AFTER, LEARNS_AFTER = 8, 48  # steps: to predict by, and to compare others with
TERMS = (
    "step",
    "answer_row",
    "prompt_row",
)  # the last takes what steps that are all alike cannot tell apart
CONTRAST_STEPS = 16  # after a change of thresholds
LONGEST_CONTRAST = 64  # steps, however often thresholds change
PRIOR = math.log(1.3)  # of b: threshold 0 should bring no more
PRIOR_WEIGHT = 44.0  # one over the square of 0.15, which it may be wrong by
LEAST_VARIANCE = 0.01  # of the logarithm of a step's time beside what was expected
VARIANCE_PART = 0.05  # of a step's, in what is taken for all
MOST = math.log(4)  # b is no larger, and no step counts as more than so far off
HALF_LIFE_S = 300.0  # of evidence: what brought nothing is tried again some day
DOUBTED = 0.25  # part that is left of evidence once it is doubted
FAMILIAR = 1.25  # times the rows of late: larger steps tell nothing about thresholds


class StepParts(NamedTuple):
    """Seconds of an exact step: its constant, its prompts' and its answers'."""

    own: float
    prompts: float
    answers: float

    @property
    def of_phases(self) -> tuple[float, float]:
        """The parts of prefill and decode; the constant belongs to the larger."""
        prefill = self.prompts >= self.answers and self.prompts > 0
        return self.prompts + self.own * prefill, self.answers + self.own * (not prefill)


class StepSpeed:
    """Predicts the time of steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._exact = CostFit(TERMS, FORGET)
        self._largest = [1.0, 1.0]  # rows of late, of prompts and of answers
        self._variance = LEAST_VARIANCE
        self._evidence, self._weight = [0.0, 0.0], [0.0, 0.0]
        self._aged_s: float | None = None
        # Thresholds, and those that the times are fitted at.
        self._at, self._before = EXACT, EXACT
        self._held = PRIOR, PRIOR  # exponents that they were fitted with
        # To be compared, and compared so far.
        self._left_steps = self._contrast_steps = 0

    @property
    def is_known(self) -> bool:
        """False while too few steps were computed for a prediction."""
        return self._num_steps >= KNOWN_AFTER

    @property
    def gains(self) -> Thresholds:
        """Speed-up that each phase is taken to have at threshold 0."""
        return Thresholds(*(math.exp(self._exponent(i)) for i in (0, 1)))

    def parts(self, prompt_rows: float, answer_rows: float) -> StepParts:
        """Return the seconds of an exact step with these rows."""
        own, answer, prompt = self._exact.cost().unit_s
        return StepParts(own, prompt * prompt_rows, answer * answer_rows)

    def seconds(self, prompt_rows: float, answer_rows: float, at: Thresholds) -> float:
        """Predict the seconds of a step."""
        prefill, decode = self.parts(prompt_rows, answer_rows).of_phases
        return prefill / self.factor(0, at.prefill) + decode / self.factor(1, at.decode)

    def factor(self, phase: int, threshold: float) -> float:
        """Return the speed-up of a phase (0: prefill, 1: decode) at a threshold."""
        return math.exp(self._exponent(phase) * (1 - threshold))

    def doubt(self) -> None:
        """Let later evidence count for more than earlier evidence."""
        self._evidence = [DOUBTED * value for value in self._evidence]
        self._weight = [DOUBTED * value for value in self._weight]

    def took(self, step: StepTaken) -> None:
        """Take note of a step."""
        if step.seconds <= 0 or not step.prompt_rows + step.answer_rows:
            return
        self._age(step.now_s)
        if step.thresholds != self._at:
            if not self._left_steps:
                self._before, self._contrast_steps = self._at, 0
                self._held = self._exponent(0), self._exponent(1)
            self._at, self._left_steps = step.thresholds, CONTRAST_STEPS
        rows = step.prompt_rows, step.answer_rows
        learns = self._num_steps >= LEARNS_AFTER
        if self._left_steps and learns and self._contrast_steps < LONGEST_CONTRAST:
            self._learn(step)
            self._left_steps, self._contrast_steps = self._left_steps - 1, self._contrast_steps + 1
        else:
            self._left_steps = 0
            expected = self.seconds(*rows, self._at)
            exact = sum(self.parts(*rows)) / expected if expected else 1.0
            if learns and expected and self._is_familiar(rows):
                off = math.log(step.seconds / expected) ** 2
                self._variance += VARIANCE_PART * (min(MOST**2, off) - self._variance)
            self._num_steps += 1
            self._exact.add((1, step.answer_rows, step.prompt_rows), step.seconds * exact)
        self._largest = [
            max(float(n), most * FORGET) for n, most in zip(rows, self._largest, strict=True)
        ]

    def _learn(self, step: StepTaken) -> None:
        """Compare a step with its prediction."""
        rows = step.prompt_rows, step.answer_rows
        parts = self.parts(*rows).of_phases
        if not sum(parts) or not self._is_familiar(rows):
            return
        step_weight = 1 / max(LEAST_VARIANCE, self._variance)
        expected = sum(
            part * math.exp(-held * (1 - threshold))
            for part, held, threshold in zip(parts, self._held, step.thresholds, strict=True)
        )
        slower = min(MOST, max(-MOST, math.log(step.seconds / expected)))
        lowered = [before - now for before, now in zip(self._before, step.thresholds, strict=True)]
        for i, (part, change) in enumerate(zip(parts, lowered, strict=True)):
            weighed = part / sum(parts) * change
            if weighed:
                # Slower than expected after a threshold fell: that brings less than was taken.
                found = self._held[i] * weighed - slower
                self._evidence[i] += step_weight * weighed * found
                self._weight[i] += step_weight * weighed**2

    def _is_familiar(self, rows: tuple[int, int]) -> bool:
        return all(n <= FAMILIAR * most for n, most in zip(rows, self._largest, strict=True))

    def _exponent(self, phase: int) -> float:
        found = PRIOR_WEIGHT * PRIOR + self._evidence[phase]
        return min(MOST, max(0.0, found / (PRIOR_WEIGHT + self._weight[phase])))

    def _age(self, now_s: float) -> None:
        keep = 0.5 ** ((now_s - (self._aged_s or now_s)) / HALF_LIFE_S)
        self._aged_s = now_s
        self._evidence = [keep * value for value in self._evidence]
        self._weight = [keep * value for value in self._weight]
