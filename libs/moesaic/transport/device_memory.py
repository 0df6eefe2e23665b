"""Memory of one device, as kernels and a transport share it that knows nothing of torch's streams.

The two sides of it, of which one is a wait for the device:

* Before the transport may read a tensor, its kernels must have finished: ``settle`` waits for all that
  this thread has started, ``mark`` for those before a moment.
* Before the transport may write into memory, kernels must be done with what was there before. Memory
  for what arrives is therefore taken for a stream on which nothing ever runs. The allocator gives to
  it only memory whose last users have finished, as ``hand_over`` has noted them; nobody waits.

On a CPU the same calls are made and none of them does anything but take memory.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.telemetry.memory import free_bytes


def device_named(name: str) -> torch.device:
    """Make the device of a setting: ``cuda`` is the first one.

    torch takes no CUDA device without an index as a thread's own, and says that it differs from the
    same one with an index.
    """
    device = torch.device(name)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


class MemoryOf(NamedTuple):
    """Bytes of a device, of which this process may still take ``free``; 0 if unknown."""

    free: int
    total: int


def memory_of(device: torch.device) -> MemoryOf:
    """Count the memory of a device.

    Of a GPU, memory that torch holds in reserve is free for this process. Of a CPU, the total is what is
    free, within the limits of control groups.
    """
    if device.type != "cuda":
        free = free_bytes()
        return MemoryOf(free, free)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryOf(free + reserved, total)


def give_back_unused(device: torch.device) -> None:
    """Give memory that torch holds in reserve back to a GPU, for other processes on it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class DeviceMemory:
    """Takes memory of one device for tensors that arrive.

    Attributes:
        device: device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        """Use ``device`` on this thread."""
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # Makes CUDA's context, which UCX needs on this thread.
            torch.empty(1, device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no type for it

    def take(self, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """Take memory ``[rows, cols]`` that no kernel uses any more."""
        if self._stream is None:
            return torch.empty(rows, cols, dtype=dtype, device=self.device)
        with torch.cuda.stream(self._stream):
            return torch.empty(rows, cols, dtype=dtype, device=self.device)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let kernels of this thread use memory that ``take`` gave, and that is filled now."""
        if self._stream is not None:
            user = torch.cuda.current_stream(self.device)
            for tensor in tensors:
                tensor.record_stream(user)


def settle(device: torch.device) -> None:
    """Wait until the kernels that this thread has started have finished; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def mark(device: torch.device) -> Callable[[], None]:
    """Mark the kernels that this thread has started so far.

    Returns:
        A wait for them, and for none that is started later; on a CPU it does nothing.
    """
    if device.type != "cuda":
        return _nothing
    written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
    written.record(torch.cuda.current_stream(device))
    return written.synchronize


def begin_to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to the host.

    Returns:
        The copy, to be read after ``settle``; on a CPU the tensor itself.
    """
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to ``device``, from the host without waiting; the tensor itself if it is there."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _nothing() -> None:
    """Wait for nothing."""
