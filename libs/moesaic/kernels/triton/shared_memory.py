"""Sizes of the GPU, by which launches are chosen."""

from functools import cache

import torch
from triton.runtime import driver

HOPPER_BYTES = 232448  # of a block, at most, as the driver tells


@cache
def is_roomy() -> bool:
    """Return true if a block has as much shared memory as on a Hopper GPU; also true without a GPU."""
    if not torch.cuda.is_available():
        return True
    facts = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return bool(facts["max_shared_mem"] >= HOPPER_BYTES)


@cache
def num_multiprocessors() -> int:
    """Return the multiprocessors of the current GPU; those of an H100 without a GPU."""
    if not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
