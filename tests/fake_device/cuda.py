"""``torch.cuda`` for the length of a block: what the product uses of it, over the fake device."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.fake_device.clocks import Clocks, DeviceFault, Streams
from tests.fake_device.guard import guard
from tests.fake_device.tensors import Device, DeviceTensor, create, is_on_device, pin, run

# Made at once in their final size: a tensor of the fake device does not grow.
CREATING = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "randperm",
    "tril_indices",
    "triu_indices",
)
_kernels: list[torch.library.Library] = []
# The interpreter keeps its grid, and what it replaces of the language, for all threads.
_one_at_a_time = threading.Lock()


@contextmanager
def fake_device(*, devices: int = 1, memory_bytes: int = 80 << 30) -> Iterator[Clocks]:
    """Give ``devices`` CUDA devices with ``memory_bytes`` each.

    Raises:
        DeviceFault: at the end of the block, if memory was given back too early.
    """
    if torch.version.cuda is not None:
        pytest.skip("the fake device stands in where torch was built without CUDA")
    guard().guard_devices(devices)
    clocks = Clocks(devices, memory_bytes)
    with pytest.MonkeyPatch.context() as patch:
        _Patches(patch, clocks)
        _register()
        patch.setattr(Device, "clocks", clocks, raising=False)
        patch.setattr(Device, "pinned", {}, raising=False)
        yield clocks
        clocks.host_waits()
    if clocks.faults:
        raise DeviceFault(clocks.faults[0])


def _register() -> None:
    """Give torch's CUDA backend its operations, once in a process."""
    if _kernels:
        return
    made = torch.library.Library("aten", "IMPL")
    for name in CREATING:
        packet, _, overload = name.partition(".")
        made.impl(
            name, _creating(getattr(getattr(torch.ops.aten, packet), overload or "default")), "CUDA"
        )
    # Torch's C++ side, where it passes by tensors' own dispatch.
    made.impl("copy_", _passed_by(torch.ops.aten.copy_.default), "CUDA")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "CUDA")
    _kernels.extend([made, rest])


def _creating(func: Any) -> Any:
    return lambda *args, **kwargs: create(func, args, kwargs)


def _passed_by(func: Any) -> Any:
    return lambda *args, **kwargs: run(func, args, kwargs)


class _Patches:
    """Names of torch, replaced until the patch ends."""

    def __init__(self, patch: pytest.MonkeyPatch, clocks: Clocks) -> None:
        self._patch, self._clocks = patch, clocks
        self._streams = Streams(clocks, self._index)
        patch.setattr(Device, "streams", self._streams, raising=False)
        self._cuda()
        self._pinned()
        self._triton()

    def _index(self, device: Any = None) -> int:
        """The index of a device, in any form; None and ``cuda`` are the current one."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return guard().current_device() if index is None else index

    def _cuda(self) -> None:
        streams, clocks = self._streams, self._clocks

        def free(device: Any = None) -> tuple[int, int]:
            return clocks.memory_bytes - clocks.used[self._index(device)], clocks.memory_bytes

        names: dict[str, Any] = {
            "Stream": streams.Stream,
            "Event": streams.Event,
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "device_count": lambda: clocks.devices,
            "current_device": lambda: guard().current_device(),
            "set_device": lambda device: guard().set_current_device(self._index(device)),
            "current_stream": streams.current,
            "default_stream": streams.default,
            "set_stream": streams.set,
            "stream": lambda stream: nullcontext() if stream is None else stream,
            "synchronize": lambda device=None: clocks.host_waits(),
            "mem_get_info": free,
            "memory_allocated": lambda device=None: clocks.used[self._index(device)],
            "memory_reserved": lambda device=None: clocks.used[self._index(device)],
            "empty_cache": lambda: None,
            "get_device_name": lambda device=None: "fake device",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
            "is_current_stream_capturing": lambda: False,
        }
        for name, value in names.items():
            self._patch.setattr(torch.cuda, name, value)
        self._patch.setattr(Tensor, "record_stream", _record_stream)

    def _pinned(self) -> None:
        """Pinned memory is the host's like any other, but its address is remembered."""
        for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
            self._patch.setattr(torch, name, _pinning(getattr(torch, name)))

        def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
            return tensor if Device.is_pinned(tensor) else pin(tensor.clone())

        self._patch.setattr(Tensor, "pin_memory", pin_memory)
        self._patch.setattr(Tensor, "is_pinned", lambda tensor, *_: Device.is_pinned(tensor))

    def _triton(self) -> None:
        """Kernels run in Triton's interpreter, on the memory of the device."""
        from triton.runtime import interpreter

        from moesaic.kernels.triton import shared_memory
        from tests.kernels.interpreted_bfloat16 import compute_bfloat16_as_a_gpu

        compute_bfloat16_as_a_gpu()
        # Asked of a real driver otherwise.
        self._patch.setattr(shared_memory, "driver", _Driver)
        shared_memory.is_roomy.cache_clear()
        launch = interpreter.InterpretedFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            used = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            for tensor in used:
                if not tensor.is_cuda and not Device.is_pinned(tensor):
                    raise ValueError(
                        "Pointer argument cannot be accessed from Triton (cpu tensor?)"
                    )
            fakes = [each for each in used if isinstance(each, DeviceTensor)]
            before = [fake.inner.clone() for fake in fakes]
            inner = tree_map_only(DeviceTensor, lambda each: each.inner, (args, kwargs))
            with _one_at_a_time:
                result = launch(kernel, *inner[0], **inner[1])
            _note_launch(fakes, before)
            return result

        self._patch.setattr(interpreter.InterpretedFunction, "run", launched)


class _Driver:
    class active:  # the driver's own name
        class utils:
            @staticmethod
            def get_device_properties(_: int) -> dict[str, int]:
                from moesaic.kernels.triton.shared_memory import HOPPER_BYTES

                return {"max_shared_mem": HOPPER_BYTES}


def _note_launch(fakes: list[DeviceTensor], before: list[Tensor]) -> None:
    """Note what a kernel has read, and what it has written: there something differs now."""
    if not fakes:
        return
    reads, writes = [], []
    for fake, old in zip(fakes, before, strict=True):
        same = torch.equal(old, fake.inner)
        (reads if same else writes).append(fake.memory)
    stream = Device.streams.current(fakes[0].memory.device).number
    Device.clocks.work(stream, reads, writes)


def _record_stream(tensor: Tensor, stream: Any) -> None:
    if isinstance(tensor, DeviceTensor):
        tensor.memory.noted.add(stream.number)


def _pinning(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        result: Tensor = make(*args, **kwargs)
        return pin(result) if pin_memory and not is_on_device(kwargs.get("device")) else result

    return made
