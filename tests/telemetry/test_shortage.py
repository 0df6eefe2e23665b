"""Memory that ran out is recognised in every form in which allocators report it, and nothing else is."""

import errno
import mmap
from collections.abc import Callable

import pytest
import torch

from moesaic.errors import CheckpointError, Overloaded
from moesaic.telemetry.shortage import ran_out_of_memory, refused_bytes, short_of_memory

OF_A_GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 GiB is "
    "free.\nSee documentation for Memory Management"
)


def on_a_gpu() -> None:
    raise torch.OutOfMemoryError(OF_A_GPU)


def pinned() -> None:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


def cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


ALLOCATORS = [
    (lambda: torch.empty(1 << 50), 4 << 50),
    (lambda: mmap.mmap(-1, 1 << 60), 0),
    (lambda: bytearray(1 << 60), 0),
    (on_a_gpu, 5 << 29),
    (pinned, 0),
    (cublas, 0),
]


@pytest.mark.parametrize(("allocate", "refused"), ALLOCATORS)
def test_each_allocator_is_understood(allocate: Callable[[], object], refused: int) -> None:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as raised:
        allocate()

    assert ran_out_of_memory(raised.value)
    assert refused_bytes(raised.value) == refused


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(errno.ENOENT, "No such file or directory"),
        CheckpointError("model.safetensors", "out of memory"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert not ran_out_of_memory(error)


def test_the_error_to_tell_has_the_bytes_and_the_fix() -> None:
    told = short_of_memory(torch.OutOfMemoryError(OF_A_GPU), "a step of 9 rows", "lower --rows")

    assert isinstance(told, Overloaded)
    assert told.retryable
    text = str(told)
    assert "a step of 9 rows ran out of memory (2684354560 bytes were refused)" in text
    assert "lower --rows" in text
