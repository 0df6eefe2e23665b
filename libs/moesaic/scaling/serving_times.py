"""Seconds of a step on a fleet of any shape, from the performance model of its parts.

Attention workers send their batches on their own, so an expert worker serves all of them, one after the other.
That is a closed network: ``m`` batches go round between their own attention worker and the experts. Mean value
analysis gives the exact mean for exponential times; as real ones vary less, this is somewhat too cautious. All
expert workers serve a batch at the same time, so the one with most to do stands for all. Where whole steps of some
shape were measured too, they correct the sums.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from moesaic.costs import RandomChoice
from moesaic.errors import InvalidInput
from moesaic.messages.performance import PART_TERMS, Estimate, Part, PartCost, PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import StepRows, StepTime

Activated = Callable[[int, float], float]
"""Expected activated experts of the worker that has most of them: by number of expert workers and rows of a batch."""

OWN_PARTS: tuple[Part, Part, Part] = "attention", "head", "step"  # of one attention worker
_REMEMBERED = 1 << 16  # times of layers
_MOST_OFF = 2.0  # times, that a sum of parts is corrected by


class ServingTimes:
    """Predicts steps: attention and head of a batch, and in each layer an exchange and the experts."""

    def __init__(
        self,
        model: PerformanceModel,
        *,
        num_moe_layers: int,
        num_experts: int,
        top_k: int,
        row_bytes: float,
        activated: Activated,
        measured: FleetShape | None = None,
    ) -> None:
        """Take costs, and the sizes of what is served.

        Args:
            model: with ``attention`` and ``experts``, or else ``step``. Links and ``head`` count where they
                are known; links between nodes before those inside one.
            num_moe_layers: layers with experts.
            num_experts: experts of a layer.
            top_k: experts of a row.
            row_bytes: bytes of the hidden state of one row; it goes to each expert worker, and a
                sum comes back.
            activated: see ``Activated``.
            measured: shape of the fleet whose whole steps were measured. Its steps take the part
                ``step``. Steps of other shapes differ from the sum of their parts by as much as its
                steps do.

        Raises:
            InvalidInput: the model lacks parts, or a number makes no sense.
        """
        parts = model.parts
        if "step" not in parts and not {"attention", "experts"} <= parts.keys():
            raise InvalidInput("model", "must have the part step, or both attention and experts")
        sizes = {"num_moe_layers": num_moe_layers, "top_k": top_k, "num_experts": num_experts}
        for field, value in sizes.items():
            if value < 1:
                raise InvalidInput(field, f"must be at least 1, got {value}")
        self._parts = parts
        self._layers, self._top_k, self._row_bytes = num_moe_layers, top_k, row_bytes
        self._choice = RandomChoice(num_experts, min(top_k, num_experts))
        self._activated = activated
        self._link = parts.get("link.inter", parts.get("link.intra"))
        self._is_apart = {"attention", "experts"} <= parts.keys()
        self._attention, self._head, self._step = (
            _Cost(parts.get(part), len(PART_TERMS[part])) for part in OWN_PARTS
        )
        known = "step" in parts and measured is not None and measured.attention and measured.experts
        self._measured = measured if known else None
        # Rows of steps repeat themselves, keys do not.
        self._layer = lru_cache(_REMEMBERED)(self._layer_of)

    def step(self, rows: StepRows, shape: FleetShape) -> StepTime:
        """Predict one step; without expert workers, or costs of both sides, a worker does it all itself.

        Raises:
            InvalidInput: the shape has no attention worker, or needs a part that the model lacks.
        """
        if shape.attention < 1:
            raise InvalidInput("shape", f"must have an attention worker, got {shape}")
        if shape.experts < 1 or not self._is_apart:
            if "step" not in self._parts:
                raise InvalidInput("shape", f"{shape} needs the part step, which was not measured")
            return self._whole_step(rows)
        found = self._sum_of_parts(rows, shape)
        if self._measured is None or not found.seconds:
            return found
        there = found if shape == self._measured else self._sum_of_parts(rows, self._measured)
        off = self._whole_step(rows).seconds / there.seconds
        off = min(_MOST_OFF, max(1 / _MOST_OFF, off))
        seconds = max(found.attention_s, off * found.seconds)
        return StepTime(seconds, found.attention_s, found.experts_s, off * found.error_s)

    def _whole_step(self, rows: StepRows) -> StepTime:
        work = rows.prompt_rows, rows.answer_rows, rows.keys, rows.prompt_keys
        amounts = 1.0, self._choice.experts(rows.rows), *work
        seconds, error_s = self._step.seconds(*amounts), self._step.error_s(*amounts)
        return StepTime(seconds, seconds, 0.0, error_s)

    def _sum_of_parts(self, rows: StepRows, shape: FleetShape) -> StepTime:
        num_rows, layers = rows.prompt_rows + rows.answer_rows, self._layers
        logits = 1.0, rows.answer_rows + (1.0 if rows.prompt_rows else 0.0)
        own = 1.0, num_rows, rows.keys, rows.prompt_keys
        attention_s = self._attention.seconds(*own) + self._head.seconds(*logits)
        exchange, experts = self._layer(shape.experts, num_rows)
        served_s, elsewhere_s = experts.seconds, attention_s / layers + exchange.seconds
        waited_s = time_at_station(shape.attention, served_s, elsewhere_s)
        slower = (
            waited_s / served_s if served_s > 0 else 1.0
        )  # others wait for what is mistaken too
        return StepTime(
            seconds=attention_s + layers * (exchange.seconds + waited_s),
            attention_s=attention_s,
            experts_s=layers * served_s,
            error_s=math.hypot(
                self._attention.error_s(*own),
                self._head.error_s(*logits),
                layers * exchange.error_s,
                layers * experts.error_s * slower,
            ),
        )

    def _layer_of(self, num_experts: int, rows: float) -> tuple[Estimate, Estimate]:
        """Predict the exchange of one layer with these workers, and the experts of the busiest one."""
        activated = self._activated(num_experts, rows)
        choices = max(activated, rows * self._top_k / num_experts)
        experts = self._parts["experts"].at((1.0, activated, choices))
        if self._link is None:
            return Estimate(0.0, 0.0, 0.0), experts
        # Every expert worker gets all rows.
        nbytes = 2 * num_experts * rows * self._row_bytes
        return self._link.at((2.0, 2.0 * num_experts, nbytes)), experts


def time_at_station(num_clients: int, service_s: float, elsewhere_s: float) -> float:
    """Return the mean seconds that a client is at the one station of a closed network, by mean value analysis.

    Args:
        num_clients: number of clients in the cycle.
        service_s: mean service time of one client, exponentially distributed.
        elsewhere_s: from its end there to its next arrival, of any distribution.
    """
    queue, there_s = 0.0, service_s
    for clients in range(1, num_clients + 1):
        there_s = service_s * (1.0 + queue)
        round_s = elsewhere_s + there_s
        queue = clients * there_s / round_s if round_s > 0 else 0.0
    return there_s


class _Cost:
    """A part's cost, made fast: steps are predicted by the ten thousand. A part that is not known costs nothing."""

    def __init__(self, cost: PartCost | None, num_terms: int) -> None:
        self.unit_s = cost.unit_s if cost is not None else (0.0,) * num_terms
        self._covariance = [
            (i, j, each)
            for i, row in enumerate(cost.covariance if cost is not None else ())
            for j, each in enumerate(row)
            if each
        ]

    def seconds(self, *amounts: float) -> float:
        return sum([unit_s * amount for unit_s, amount in zip(self.unit_s, amounts, strict=False)])

    def error_s(self, *amounts: float) -> float:
        if not self._covariance:
            return 0.0
        variance = sum([each * amounts[i] * amounts[j] for i, j, each in self._covariance])
        return math.sqrt(max(0.0, variance))
