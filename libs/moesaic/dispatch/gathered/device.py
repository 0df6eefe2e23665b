"""Memory of a device for a few layers of experts, and the copies that fill it while kernels compute.

Copies and kernels have a stream each, and neither stream ever waits for the host. Three waits keep what
is read apart from what is written:

| what | waits for | where |
|---|---|---|
| kernels of a layer | the last copy of the layer's experts | on the stream of kernels |
| copies into a buffer | the last kernels that read the buffer | on the stream of copies |
| the host, before it writes to memory again | the last copy from that memory | on a thread of its own |
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.dispatch.gathered.ring import Fill
from moesaic.errors import InUse

OWN_PAGES_BYTES = 32 << 20
"""The C library maps memory of so many bytes by itself; smaller pieces may share pages, which are locked once."""

Event = Any  # what a stream has recorded; only the streams that made it know how to read it


class DeviceStreams(Protocol):
    """The two streams of a device: copies to it, and kernels of the calling thread."""

    def lock(self, memory: Iterable[Tensor]) -> None:
        """Keep memory of the host in its place until ``close``, so that copies from it wait for nothing.

        It takes seconds for many gigabytes. Copies from other memory are right, and wait for CUDA's own buffers.

        Raises:
            InUse: the system does not let it.
        """
        ...

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Copy from the host to the device, once the copies before have ended; returns at once."""
        ...

    def record_copies(self) -> Event:
        """Make an event that comes when all copies up to now have ended."""
        ...

    def record_kernels(self) -> Event:
        """Make an event that comes when all kernels up to now have ended."""
        ...

    def copies_wait(self, event: Event) -> None:
        """Let later copies begin after ``event``; returns at once."""
        ...

    def kernels_wait(self, event: Event) -> None:
        """Let later kernels begin after ``event``; returns at once."""
        ...

    def has_come(self, event: Event) -> bool:
        """Tell whether ``event`` has come."""
        ...

    async def come(self, event: Event) -> None:
        """Wait for ``event``."""
        ...

    def seconds(self, first: Event, last: Event) -> float:
        """Measure the time between two events; waits for both."""
        ...

    def close(self) -> None:
        """Wait for all copies."""
        ...


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Copy to ``device``."""
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no type for it
        self._locked: list[Tensor] = []
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def lock(self, memory: Iterable[Tensor]) -> None:
        """See ``DeviceStreams``; ``pin_memory`` would take the next power of two, up to twice the bytes."""
        # A new thread would take the first device, and memory there.
        torch.cuda.set_device(self._device)
        for each in memory:
            if each.nbytes < OWN_PAGES_BYTES:
                continue
            if error := int(_cuda().cudaHostRegister(each.data_ptr(), each.nbytes, 0)):
                raise InUse(
                    "device",
                    f"CUDA cannot lock {each.nbytes} bytes of this machine's memory for copies to "
                    f"{self._device} (error {error}): end what else uses memory here, or use --offload",
                )
            self._locked.append(each)

    def copy(self, source: Tensor, into: Tensor) -> None:
        """See ``DeviceStreams``."""
        with torch.cuda.stream(self._copies):
            into.copy_(source, non_blocking=True)

    def record_copies(self) -> Event:
        """See ``DeviceStreams``; the thread that waits for the event sleeps."""
        return self._recorded(self._copies, blocking=True)

    def record_kernels(self) -> Event:
        """See ``DeviceStreams``."""
        return self._recorded(torch.cuda.current_stream(self._device), blocking=False)

    def copies_wait(self, event: Event) -> None:
        """See ``DeviceStreams``."""
        self._copies.wait_event(event)

    def kernels_wait(self, event: Event) -> None:
        """See ``DeviceStreams``."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def has_come(self, event: Event) -> bool:
        """See ``DeviceStreams``."""
        return bool(event.query())

    async def come(self, event: Event) -> None:
        """See ``DeviceStreams``."""
        if not event.query():
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._waiting, event.synchronize)

    def seconds(self, first: Event, last: Event) -> float:
        """See ``DeviceStreams``."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def close(self) -> None:
        """See ``DeviceStreams``; memory of the host is free to go then."""
        torch.cuda.set_device(self._device)
        self._copies.synchronize()
        self._waiting.shutdown()
        for memory in self._locked:
            _cuda().cudaHostUnregister(memory.data_ptr())
        self._locked = []

    def _recorded(self, stream: torch.cuda.Stream, *, blocking: bool) -> Event:
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record(stream)
        return event


def _cuda() -> Any:
    """CUDA's own functions, as far as torch has them."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no type for it


class DeviceBuffers:
    """The buffers of a ring on a device. The host has memory of its own for what is on its way to each."""

    def __init__(self, memory: Sequence[Tensor], streams: DeviceStreams) -> None:
        """
        Args:
            memory: memory of each buffer, on the device, uint8 ``[rows, nbytes]``.
            streams: the streams of that device, of this thread.
        """
        self.memory, self.streams = memory, streams
        # Whoever had the memory before may still use it.
        self._read: list[Event] = [streams.record_kernels() for _ in memory]
        self._copied: list[Event | None] = [None for _ in memory]

    async def copied(self, buffer: int) -> None:
        """Wait until the host's memory for ``buffer`` may be written to again."""
        event = self._copied[buffer]
        if event is not None:
            await self.streams.come(event)

    def begin(self, fill: Fill) -> Event:
        """Let copies wait for the kernels that read the buffer last.

        Returns:
            The event of their end.
        """
        self.streams.copies_wait(self._read[fill.buffer])
        return self.streams.record_copies()

    def copy(self, fill: Fill, first: int, rows: Tensor) -> None:
        """Copy ``rows`` of the host, uint8 ``[n, nbytes]``, to the buffer's rows from ``first`` on."""
        self.streams.copy(rows, self.memory[fill.buffer][first : first + len(rows)])

    def end(self, fill: Fill) -> Event:
        """Note that the fill has no more copies, whether all of its experts came or not.

        Returns:
            The event of the last copy.
        """
        event = fill.copied = self._copied[fill.buffer] = self.streams.record_copies()
        return event

    @contextmanager
    def reading(self, fill: Fill) -> Iterator[None]:
        """Have the kernels that the block starts wait for the copies of ``fill``, and later copies for them."""
        self.streams.kernels_wait(fill.copied)
        try:
            yield
        finally:
            self._read[fill.buffer] = self.streams.record_kernels()
