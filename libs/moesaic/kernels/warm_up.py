"""Warm-up: kernels run once before requests come, at the numbers of rows that these will have.

A kernel is compiled at its first launch, which takes seconds, and its code reaches the device then.
Of all that differs from step to step, kernels are specialised only on tile shapes. These change at
powers of two, so powers of two and the largest step cover all kernels that are ever compiled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch

from moesaic.brownout.split import Level
from moesaic.errors import InUse
from moesaic.kernels.promised import PromisedRows
from moesaic.telemetry.shortage import first_line, ran_out_of_memory

WARMING = "warming kernels"  # what a worker waits for meanwhile, for people
MOST_ROWS = 2048  # larger batches compile no further kernels of experts


def row_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... below ``most``, then ``most``; nothing for 0."""
    powers = takewhile(lambda count: count < most, (2**i for i in range(63)))
    return [*powers, most] if most else []


def half_promised(num_rows: int, device: torch.device) -> PromisedRows:
    """Promise made-up rows half of their choices."""
    return PromisedRows([Level(0.5)], torch.zeros(num_rows, dtype=torch.uint8), device)


@contextmanager
def warming(device: torch.device, setting: str, complaint: str) -> Iterator[None]:
    """Run the block without gradients, and wait at its end for what it has started on ``device``.

    Raises:
        InUse: the device has too little memory, as ``complaint`` says; ``setting`` is to be lowered.
    """
    with within_memory(device, setting, complaint), torch.inference_mode():
        if device.type == "cuda":
            # Of this thread, which may be another one than the engine's.
            torch.cuda.set_device(device)
        yield
        if device.type == "cuda":
            # Not for the whole device: another thread may be capturing there.
            torch.cuda.current_stream(device).synchronize()


@contextmanager
def within_memory(
    device: torch.device, setting: str, complaint: str, fix: str = "lower it"
) -> Iterator[None]:
    """Name the setting to change if the block runs out of memory.

    Args:
        device: device of the memory.
        setting: flag that decides how much the block takes.
        complaint: what the block takes, in words.
        fix: change of the setting.

    Raises:
        InUse: the device has too little memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not ran_out_of_memory(error):
            raise
        told = f"{complaint} does not fit the memory of {device}: {fix}"
        raise InUse(setting, f"{told} ({first_line(error)})") from error
