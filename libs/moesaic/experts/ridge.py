"""Measures the ridge: the rows at which an expert begins to cost more than its weights alone."""

import math
import statistics
import time

import torch

from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.gated_mlp import make_mlp
from moesaic.kernels.linear import Quantization
from moesaic.models.configuration.config import ModelConfig

_BYTES = 32 << 20  # of weights, as if read from memory
_MOST_EXPERTS = 32
_FEW, _MANY = 16, 48  # rows of an expert, where they cost most: the slope between them is a row's
_ROUNDS = 5


def measure_ridge(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
) -> int:
    """Measure the ridge on the experts' own kernel, in a fraction of a second, with made-up weights.

    Returns:
        Rows that take an expert as long as its weights alone; 0 where that cannot be seen. It is
        rounded to a power of two, so that alike workers find the same, busy or not.
    """
    hidden, size = config.hidden_size, config.moe.expert_size
    count = max(1, min(_MOST_EXPERTS, _BYTES // (3 * hidden * size * dtype.itemsize)))
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random).sub_(0.5).to(device, dtype)

    mlps = [
        make_mlp(made(2 * size, hidden), made(hidden, size), quantization) for _ in range(count)
    ]
    table = SlotTable({0: LayerSlots(tuple(range(count)), tuple(mlps))})

    def expert_s(rows: int) -> float:
        hidden_states = made(count * rows, hidden)
        slot_ids = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(rows)
        weights = torch.ones(count * rows, 1, device=device)
        times = []
        for _ in range(_ROUNDS + 1):  # the first warms up
            started = time.perf_counter()
            table.compute_slots(0, hidden_states, weights, slot_ids[:, None]).cpu()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:]) / count

    with torch.inference_mode():
        weights_s, few_s, many_s = expert_s(1), expert_s(_FEW), expert_s(_MANY)
    row_s = (many_s - few_s) / (_MANY - _FEW)
    return ridge_of(weights_s, row_s)


def ridge_of(weights_s: float, row_s: float) -> int:
    """The power of two nearest to the rows that take as long as the weights.

    Returns:
        0 if rows cost nothing.
    """
    if row_s <= 0:
        return 0
    return 1 << max(0, round(math.log2(weights_s / row_s)))
