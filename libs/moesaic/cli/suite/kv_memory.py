"""The memory that each attention worker of a suite may use for KV.

Workers that start together cannot see what the others are about to load, so the amount is computed
before any of them starts.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.cli.suite.processes import slots_per_layer

if TYPE_CHECKING:
    from moesaic.cli.suite.processes import SuiteOptions
    from moesaic.settings import ServiceSettings

FRACTION = 0.5  # of the memory that all weights leave free
PROCESS_BYTES = 400 << 20  # a process that computes, besides weights
VARIABLE = "MOESAIC_KV_MEMORY_BYTES"
CHOSEN = {"kv_blocks", "kv_memory_bytes", "kv_memory_fraction"}  # settings by which a user decides


def kv_environment(
    options: "SuiteOptions", num_experts: int, attention: "ServiceSettings"
) -> dict[str, str]:
    """Give the variable that bounds the KV of attention workers; nothing if the user has bounded it.

    Args:
        options: of the suite.
        num_experts: of the model, in a layer.
        attention: settings of each attention worker.
    """
    if attention.model_fields_set & CHOSEN:
        return {}
    from moesaic.telemetry.memory import free_bytes

    itemsize = 2 if getattr(attention, "dtype", "") in ("bfloat16", "float16") else 4
    others, experts = _sizes(Path(options.model), itemsize)
    taken = others * options.all_attention + _copies(options, num_experts) * experts
    processes = options.all_attention
    if options.topology == "disaggregated":
        processes += options.all_experts
    left = free_bytes() - math.ceil(taken) - processes * PROCESS_BYTES
    return {VARIABLE: str(max(1, int(FRACTION * left) // options.all_attention))}


def _sizes(model: Path, itemsize: int) -> tuple[int, int]:
    """Bytes in memory of all weights but the routed experts', and of these."""
    from moesaic.models.weights.files import list_tensors

    sizes = {True: 0, False: 0}
    for name, tensor in list_tensors(model).items():
        sizes[".experts." in name] += math.prod(tensor.shape) * itemsize
    return sizes[False], sizes[True]


def _copies(options: "SuiteOptions", num_experts: int) -> float:
    """Copies of the model's experts in all processes together."""
    if options.topology == "local":
        return options.attention
    if options.topology == "disaggregated":
        return slots_per_layer(options, num_experts) * options.all_experts / num_experts
    return 1  # the layers that are fetched ahead are few
