"""ExpertCosts of one worker: measured on made-up batches when it starts, and on real ones as they are answered."""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from moesaic.costs import CostBook, CostFit
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.experts.without_python import AnswersWithoutPython
from moesaic.kernels.gated_mlp import make_mlp
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import activation_dtype
from moesaic.messages.performance import PART_TERMS, FitSums, PartCost
from moesaic.models.configuration.config import ModelConfig

_BYTES = 32 << 20  # of weights, as if read from memory
_MOST_EXPERTS = 32
_ROWS = (1, 16, 48)  # of an expert: few, and where they cost most
_ROUNDS = 5

FORGET = 0.999  # what a batch counts after the next one
MOST_UNTAKEN = 256  # batches that Python answered: the last ones between two looks


class ExpertBatch(NamedTuple):
    """One layer's batch on one worker."""

    experts: int  # activated here
    choices: int  # of them
    seconds: float  # that computing them took


class ExpertCosts:
    """Measures batches, and fits their costs when it is asked for them. Any thread may call."""

    def __init__(self) -> None:
        """Know nothing."""
        self._lock, self._book = threading.Lock(), CostBook(FORGET)
        self._untaken: deque[ExpertBatch] = deque(maxlen=MOST_UNTAKEN)

    def note(self, batch: ExpertBatch) -> None:
        """Take note of a batch."""
        with self._lock:
            self._untaken.append(batch)

    def take(self, answers: AnswersWithoutPython | None) -> dict[str, FitSums]:
        """Fit what came together, that of ``answers`` too.

        Returns:
            All that is known, by part.
        """
        with self._lock:
            samples = list(self._untaken)
            self._untaken.clear()
        if answers is not None:
            samples += [ExpertBatch(*each) for each in answers.take_samples()]
        for experts, choices, seconds in samples:
            self._book.add("experts", (1, experts, choices), seconds)
        return self._book.sums()


def measure_experts(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
) -> list[ExpertBatch]:
    """Time the experts' own kernel on made-up weights and rows, in a fraction of a second."""
    hidden, size = config.hidden_size, config.moe.expert_size
    count = max(1, min(_MOST_EXPERTS, _BYTES // (3 * hidden * size * dtype.itemsize)))
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random).sub_(0.5).to(device, dtype)

    mlps = [
        make_mlp(made(2 * size, hidden), made(hidden, size), quantization) for _ in range(count)
    ]
    table = SlotTable({0: LayerSlots(tuple(range(count)), tuple(mlps))})
    batches = []
    with torch.inference_mode():
        for each in _ROWS:
            rows = made(count * each, hidden).to(activation_dtype(dtype, device))
            slot_ids = torch.arange(count, dtype=torch.int32, device=device)
            slot_ids = slot_ids.repeat_interleave(each)[:, None]
            weights = torch.ones(count * each, 1, device=device)
            times = []
            # The first warms up.
            for _ in range(_ROUNDS + 1):
                started = time.perf_counter()
                table.compute_slots(0, rows, weights, slot_ids).cpu()
                times.append(time.perf_counter() - started)
            batches.append(ExpertBatch(count, count * each, statistics.median(times[1:])))
    return batches


def experts_cost(batches: Iterable[ExpertBatch]) -> PartCost:
    """Fit the cost of some batches."""
    fit = CostFit(PART_TERMS["experts"], forget=1.0)
    for batch in batches:
        fit.add((0, batch.experts, batch.choices), batch.seconds)
    return fit.cost()


def ridge_of(cost: PartCost) -> int:
    """Find the ridge: the rows at which an expert begins to cost more than its weights alone.

    Returns:
        The power of two that is nearest, so that alike workers find the same, busy or not; 0 if rows cost nothing.
    """
    _, expert_s, row_s = cost.unit_s
    if row_s <= 0 or expert_s <= 0:
        return 0
    return 1 << max(0, round(math.log2(expert_s / row_s)))
