"""Seconds of simulated steps: those that a model predicts for a fleet's shape, and noise around them."""

import math
import random
from dataclasses import dataclass

from moesaic.costs import RandomChoice
from moesaic.errors import InvalidInput
from moesaic.messages.performance import PART_TERMS, PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import StepRows, StepTime, StepTimes
from moesaic.simulation.planning import PlannedRows


class MeasuredSteps:
    """Steps of the shape that was measured, whatever the shape: the part ``step`` of a performance model."""

    def __init__(self, model: PerformanceModel, choice: RandomChoice) -> None:
        """Take the costs of a model, and how its rows choose experts.

        Raises:
            InvalidInput: the model has none of whole steps.
        """
        if "step" not in model.parts:
            raise InvalidInput("model", "must have the part step: measure it, or use other times")
        unit_s = dict.fromkeys(PART_TERMS["step"], 0.0)
        unit_s |= zip(model.parts["step"].terms, model.parts["step"].unit_s, strict=True)
        self._step_s, self._expert_s, self._prompt_row_s, self._answer_row_s, *keys_s = (
            unit_s.values()
        )
        self._key_s, self._prompt_key_s = keys_s
        self._experts = choice.experts

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        """See ``StepTimes``."""
        seconds = (
            self._step_s
            + self._expert_s * self._experts(rows.rows)
            + self._prompt_row_s * rows.prompt_rows
            + self._answer_row_s * rows.answer_rows
            + self._key_s * rows.keys
            + self._prompt_key_s * rows.prompt_keys
        )
        return StepTime(seconds, seconds, 0.0)


@dataclass
class StepClock:
    """Times of the steps of a fleet.

    Attributes:
        times: predicts them.
        shape: of the fleet now.
        spread: standard deviation of a step's noise, as a part of its time, as ``PartCost`` has it; the mean stays.
        seed: of the noise.
    """

    times: StepTimes
    shape: FleetShape
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._variance = math.log1p(self.spread**2)  # of the logarithm
        self._random = random.Random(self.seed)

    def time(self, planned: PlannedRows) -> tuple[StepTime, float]:
        """Predict the planned step, and by how many seconds each of the alike ones takes longer than the one before.

        A run's seconds are exact where they grow in proportion to keys, and nearly so elsewhere.
        """
        first = self._step(planned, 0)
        if planned.most_steps == 1:
            return first, 0.0
        later = planned.most_steps - 1
        return first, (self._step(planned, later).seconds - first.seconds) / later

    def noise(self, num_steps: int) -> float:
        """Draw the factor by which so many steps together take longer than predicted, steps on their own."""
        if not self._variance:
            return 1.0
        variance = self._variance / num_steps
        return math.exp(self._random.gauss(-variance / 2, math.sqrt(variance)))

    def _step(self, planned: PlannedRows, later: int) -> StepTime:
        keys = planned.keys + later * planned.answer_rows
        rows = StepRows(planned.prompt_rows, planned.answer_rows, keys, planned.prompt_keys)
        return self.times.step(rows, self.shape)
