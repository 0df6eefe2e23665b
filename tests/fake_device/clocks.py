"""Streams, events and the host as vector clocks: who has waited for what.

Work is done at once, on the host. The clocks only know how much of it a GPU would have promised to
have done. Three faults are found by them, which otherwise show on a GPU alone, and rarely:

* two streams use the same memory, at least one writes, and neither has waited for the other;
* memory is given back while a stream that it was not taken for may still use it;
* the host reads a copy, or writes over one's source, before it has waited for the copy.

A wait by any thread counts for all of them: how threads hand tensors to each other is not seen.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Clock = dict[int, int]  # by stream, how many pieces of work are known to be done


class DeviceFault(AssertionError):
    """A program does on the fake device what goes wrong on a real one."""


@dataclass(eq=False)
class _Copy:
    """A copy between host and device that the host has not waited for.

    Attributes:
        at: stream and number of the work.
        host: memory of the host.
        content: what the device writes there, or reads.
        arrives: the device writes.
    """

    at: tuple[int, int]
    host: Tensor
    content: Tensor
    arrives: bool

    def finish(self) -> str | None:
        """Let it arrive; return what the program did wrong, if it did."""
        if self.arrives:
            self.host.copy_(self.content)
            return None
        if torch.equal(_bits(self.host), _bits(self.content)):
            return None
        return "pinned memory was written over before its copy to the device was waited for"


@dataclass(eq=False)
class Memory:
    """One allocation.

    Attributes:
        device: index of its device.
        nbytes: size.
        stream: stream that it was taken for.
    """

    clocks: "Clocks" = field(repr=False)
    device: int
    nbytes: int
    stream: int
    written: tuple[int, int] | None = None
    read: Clock = field(default_factory=dict)
    noted: set[int] = field(default_factory=set)  # by ``record_stream``

    def __del__(self) -> None:
        self.clocks.give_back(self)


class Clocks:
    """All streams of a process.

    Attributes:
        faults: what was found where nothing can be raised.
    """

    def __init__(self, devices: int, memory_bytes: int) -> None:
        """Begin with the default stream of each device."""
        self.devices, self.memory_bytes = devices, memory_bytes
        self.used = [0] * devices
        self.faults: list[str] = []
        self._lock = threading.RLock()
        self._host: Clock = {}
        self._streams: list[Clock] = [{} for _ in range(devices)]
        self._copies: list[_Copy] = []

    def new_stream(self) -> int:
        """Return the number of another stream."""
        with self._lock:
            self._streams.append({})
            return len(self._streams) - 1

    def take(self, device: int, nbytes: int, stream: int) -> Memory:
        """Take memory for a stream; raises ``OutOfMemoryError``."""
        with self._lock:
            free = self.memory_bytes - self.used[device]
            if nbytes > free:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes} bytes; {free} bytes are free"
                )
            self.used[device] += nbytes
            return Memory(self, device, nbytes, stream)

    def give_back(self, memory: Memory) -> None:
        """Note that nobody holds ``memory`` any more."""
        with self._lock:
            self.used[memory.device] -= memory.nbytes
            own = _merged(self._streams[memory.stream], self._host)
            uses = [*memory.read.items(), *([memory.written] if memory.written else [])]
            for stream, number in uses:
                if stream not in (memory.stream, *memory.noted) and own.get(stream, 0) < number:
                    self.faults.append(
                        f"memory of stream {memory.stream} was given back while stream {stream} "
                        "may use it: call record_stream, or wait"
                    )

    def work(self, stream: int, reads: Iterable[Memory], writes: Iterable[Memory]) -> int:
        """Note work of a stream, with the memory that it uses; return its number.

        Raises:
            DeviceFault: another stream may be using that memory.
        """
        with self._lock:
            clock = self._streams[stream] = _merged(self._streams[stream], self._host)
            clock[stream] = clock.get(stream, 0) + 1
            for memory in reads:
                self._check(clock, stream, memory.written)
                memory.read[stream] = clock[stream]
            for memory in writes:
                self._check(clock, stream, memory.written)
                for use in memory.read.items():
                    self._check(clock, stream, use)
                memory.written, memory.read = (stream, clock[stream]), {}
            return clock[stream]

    def host_uses(self, memory: Memory, *, writes: bool) -> None:
        """Check that the host has waited for all who use memory that it reads or ``writes``, as a transport does.

        Raises:
            DeviceFault: it has not.
        """
        with self._lock:
            uses = [memory.written] if memory.written else []
            for stream, number in [*uses, *(memory.read.items() if writes else ())]:
                if self._host.get(stream, 0) < number:
                    what = "writes into" if writes else "reads"
                    raise DeviceFault(f"the host {what} memory that stream {stream} may still use")

    def moment(self, stream: int) -> Clock:
        """Return all that is known to be done once the stream has done its work."""
        with self._lock:
            return dict(self._streams[stream])

    def stream_waits(self, stream: int, moment: Clock) -> None:
        """Let later work of a stream come after ``moment``."""
        with self._lock:
            self._streams[stream] = _merged(self._streams[stream], moment)

    def host_waits(self, moment: Clock | None = None) -> None:
        """Let the host wait for ``moment``, or for everything.

        Raises:
            DeviceFault: see ``_Copy.finish``.
        """
        with self._lock:
            for clock in self._streams if moment is None else [moment]:
                self._host = _merged(self._host, clock)
            done = [each for each in self._copies if self._host.get(each.at[0], 0) >= each.at[1]]
            self._copies = [each for each in self._copies if each not in done]
            with torch.inference_mode():
                wrong = [fault for each in done if (fault := each.finish())]
        if wrong:
            raise DeviceFault(wrong[0])

    def copy_later(self, stream: int, number: int, host: Tensor, content: Tensor) -> None:
        """Write ``content`` to the host when it waits; until then it reads what makes no sense."""
        with self._lock, torch.inference_mode():
            host.copy_(_nonsense(content))
            self._copies.append(_Copy((stream, number), host, content, arrives=True))

    def copied_from(self, stream: int, number: int, host: Tensor) -> None:
        """Note that the device reads ``host`` until somebody waits."""
        with self._lock:
            self._copies.append(_Copy((stream, number), host, host.clone(), arrives=False))

    def _check(self, clock: Clock, stream: int, use: tuple[int, int] | None) -> None:
        if use is not None and clock.get(use[0], 0) < use[1]:
            raise DeviceFault(
                f"stream {stream} uses memory that stream {use[0]} may still use: "
                "let it wait for an event of that stream"
            )


class Streams:
    """``torch.cuda`` as far as streams and events go, over ``clocks``."""

    def __init__(self, clocks: Clocks, device: Callable[[Any], int]) -> None:
        """Use ``device``, which gives the index of a device, and of None the current one."""
        self.clocks, self.index = clocks, device
        self._own = threading.local()
        streams = self

        class Stream:
            """See ``torch.cuda.Stream``."""

            def __init__(self, device: Any = None, priority: int = 0, *, number: int = -1) -> None:
                self.device = torch.device("cuda", streams.index(device))
                self.number = clocks.new_stream() if number < 0 else number

            @property
            def cuda_stream(self) -> int:
                return self.number

            def synchronize(self) -> None:
                clocks.host_waits(clocks.moment(self.number))

            def query(self) -> bool:
                self.synchronize()
                return True

            def wait_stream(self, stream: "Stream") -> None:
                clocks.stream_waits(self.number, clocks.moment(stream.number))

            def wait_event(self, event: "Event") -> None:
                clocks.stream_waits(self.number, event.moment)

            def record_event(self, event: "Event | None" = None) -> "Event":
                event = event or Event()
                event.record(self)
                return event

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.number == self.number

            def __hash__(self) -> int:
                return self.number

            def __enter__(self) -> "Stream":
                streams.entered.append(streams.current(self.device))
                streams.set(self)
                return self

            def __exit__(self, *_: object) -> None:
                streams.set(streams.entered.pop())

        class Event:
            """See ``torch.cuda.Event``."""

            def __init__(self, *_: object, **__: object) -> None:
                self.moment: Clock = {}
                self._asked = False

            def record(self, stream: Stream | None = None) -> None:
                self.moment = clocks.moment((stream or streams.current()).number)
                self._asked = False

            def synchronize(self) -> None:
                clocks.host_waits(self.moment)

            def wait(self, stream: Stream | None = None) -> None:
                (stream or streams.current()).wait_event(self)

            def query(self) -> bool:
                """Return false once, for work takes its time."""
                if not self._asked:
                    self._asked = True
                    return False
                self.synchronize()
                return True

            def elapsed_time(self, other: "Event") -> float:
                return 1.0

        self.Stream, self.Event = Stream, Event
        self._defaults = [
            Stream(torch.device("cuda", at), number=at) for at in range(clocks.devices)
        ]

    @property
    def entered(self) -> list[Any]:
        """Streams that this thread goes back to."""
        if not hasattr(self._own, "entered"):
            self._own.entered = []
        entered: list[Any] = self._own.entered
        return entered

    def default(self, device: Any = None) -> Any:
        """See ``torch.cuda.default_stream``."""
        return self._defaults[self.index(device)]

    def current(self, device: Any = None) -> Any:
        """See ``torch.cuda.current_stream``."""
        return getattr(self._own, "current", {}).get(self.index(device), self.default(device))

    def set(self, stream: Any) -> None:
        """See ``torch.cuda.set_stream``."""
        if stream is not None:
            self._own.current = getattr(self._own, "current", {}) | {stream.device.index: stream}


def _merged(one: Clock, other: Clock) -> Clock:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _nonsense(content: Tensor) -> Tensor:
    """What lies in memory that nobody has written: never the content."""
    if content.dtype.is_floating_point and content.dtype.itemsize > 1:
        return torch.full_like(content, float("nan"))
    flat = _bits(content.clone())
    return (
        (~flat).view(content.dtype).view(content.shape) if content.dtype != torch.bool else ~content
    )
