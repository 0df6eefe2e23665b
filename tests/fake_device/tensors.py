"""Tensors that say ``cuda``, lie in the host's memory, and are computed there."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.fake_device.clocks import Clocks, Memory, Streams
from tests.fake_device.rules import aten, check_devices

# Modules that may have an address of the device: kernels of it, and a transport that knows its memory.
MAY_ADDRESS = (
    "moesaic.kernels.coded_matrix",
    "moesaic.kernels.triton",
    "moesaic.transport.ucx",
    "triton",
    "tests",
    "ucxx",
)

# They only take memory.
EMPTY = {aten.empty.memory_format, aten.empty_strided.default}


class Device:
    """What is fake at the moment: the clocks, the streams and the host's pinned memory."""

    clocks: Clocks
    streams: Streams
    pinned: dict[int, Any]  # by address, weak references to storages

    @classmethod
    def is_pinned(cls, tensor: Tensor) -> bool:
        """Tell if a tensor of the host lies in pinned memory."""
        storage = tensor.untyped_storage()
        found = cls.pinned.get(storage.data_ptr())
        return found is not None and found() is not None


class DeviceTensor(Tensor):
    """A tensor of the fake device.

    Attributes:
        inner: the tensor of the host with the numbers.
        memory: allocation that it lies in; views share it.
    """

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> "DeviceTensor":
        """Wrap ``inner``."""
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", memory.device),
        )
        made.inner, made.memory = inner, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation."""
        return run(func, args, kwargs or {})

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Fail as on a GPU."""
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        """Copy to the host, and wait."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Return the address, to those who may know what to do with it."""
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if not asker.startswith(MAY_ADDRESS):
            raise RuntimeError(f"{asker} takes an address of the device for one of the host")
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        """Return the storage of the numbers; it tells which tensors share memory."""
        return self.inner.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        """Return false."""
        return False

    def pin_memory(self, *_: Any) -> Tensor:
        """Fail as on a GPU."""
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )

    def __repr__(self, *_: Any, **__: Any) -> str:
        """Show the numbers and the device."""
        return f"{self.inner!r} on {self.device}"


def is_on_device(device: Any) -> bool:
    """Tell if ``device``, in any of the forms that torch takes, is a fake one."""
    return device is not None and torch.device(device).type == "cuda"


def create(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DeviceTensor:
    """Make a tensor of the device: ``func`` makes one of the host."""
    device = Device.streams.index(kwargs.get("device"))
    named = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    inner = func(*args, **(named | {"device": torch.device("cpu")}))
    return _wrapped(inner, device, [], writes=func not in EMPTY)


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute ``func`` on numbers of the host, where the device would.

    Raises:
        RuntimeError: tensors are on different devices.
        DeviceFault: streams are in each other's way.
    """
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._to_copy.default and isinstance(args[0], DeviceTensor):
        return _to_copy(args[0], kwargs)
    if func is aten._local_scalar_dense.default:
        _wait_for_current(args[0])
        return func(args[0].inner)
    if func is aten.record_stream.default:
        args[0].memory.noted.add(args[1].number)
        return None
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    check_devices(func, tensors, args)
    return _compute(func, args, kwargs, tensors)


def _compute(func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    fakes = [each for each in tensors if isinstance(each, DeviceTensor)]
    named, device = dict(kwargs), fakes[0].memory.device if fakes else None
    if named.get("device") is not None:
        device = Device.streams.index(named["device"]) if is_on_device(named["device"]) else None
        named["device"] = torch.device("cpu")
    if "pin_memory" in named:
        named["pin_memory"] = False
    written = _written(func, args, named)
    inner_args, inner_named = tree_map_only(DeviceTensor, lambda each: each.inner, (args, named))
    out = func(*inner_args, **inner_named)
    for fake in fakes:
        assert fake.shape == fake.inner.shape, f"{func} has resized a tensor of the fake device"
    if device is None:
        return out
    views = _is_view(func)
    if not views:
        reads = [fake.memory for fake in fakes if not any(fake is each for each in written)]
        stream = Device.streams.current(device).number
        Device.clocks.work(stream, reads, [each.memory for each in written])
    return tree_map_only(Tensor, lambda each: _wrapped(each, device, fakes, writes=not views), out)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[DeviceTensor]:
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_leaves(value) if isinstance(each, DeviceTensor)]
    return found


def _is_view(func: Any) -> bool:
    """Tell if an operation gives what it got, in another shape, and reads no number."""
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _wrapped(
    inner: Tensor, device: int, given: Sequence[DeviceTensor], *, writes: bool
) -> DeviceTensor:
    """The tensor of the device for a result: one of the ``given``, a view of one, or a new one."""
    for fake in given:
        if inner is fake.inner:
            return fake
    address = inner.untyped_storage().data_ptr()
    for fake in given:
        if address and address == fake.inner.untyped_storage().data_ptr():
            # A view is of inference mode if what it views is.
            with torch.inference_mode(fake.is_inference()):
                return DeviceTensor(inner, fake.memory)
    stream = Device.streams.current(device).number
    memory = Device.clocks.take(device, inner.untyped_storage().nbytes(), stream)
    if writes:
        Device.clocks.work(stream, [], [memory])
    return DeviceTensor(inner, memory)


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``copy_``: between devices, to the host, or from it."""
    if isinstance(to, DeviceTensor):
        stream = Device.streams.current(to.memory.device).number
        if isinstance(source, DeviceTensor):
            _join(source.memory.device, to.memory.device)
            Device.clocks.work(stream, [source.memory], [to.memory])
            to.inner.copy_(source.inner)
            _join(to.memory.device, source.memory.device)
            return to
        number = Device.clocks.work(stream, [], [to.memory])
        to.inner.copy_(source)
        if not non_blocking:
            Device.clocks.host_waits(Device.clocks.moment(stream))
        elif Device.is_pinned(source):
            Device.clocks.copied_from(stream, number, source)
        return to
    assert isinstance(source, DeviceTensor)
    stream = Device.streams.current(source.memory.device).number
    number = Device.clocks.work(stream, [source.memory], [])
    content = source.inner.to(to.dtype).expand(to.shape).clone()
    if non_blocking and Device.is_pinned(to):
        Device.clocks.copy_later(stream, number, to, content)
        return to
    Device.clocks.host_waits(Device.clocks.moment(stream))
    to.copy_(content)
    return to


def _to_copy(source: DeviceTensor, kwargs: dict[str, Any]) -> Tensor:
    """``to`` that copies."""
    named = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
    named.pop("pin_memory", None)
    device = kwargs.get("device")
    if device is None or is_on_device(device):
        index = source.memory.device if device is None else Device.streams.index(device)
        _join(source.memory.device, index)
        Device.clocks.work(Device.streams.current(index).number, [source.memory], [])
        inner = aten._to_copy.default(source.inner, **named)
        made = _wrapped(inner, index, [], writes=True)
        _join(index, source.memory.device)
        return made
    to = aten._to_copy.default(source.inner, **named)
    if kwargs.get("non_blocking"):
        pin(to)
    return _copy(to, source, bool(kwargs.get("non_blocking")))


def _join(first: int, then: int) -> None:
    """Let the current stream of a device wait for another one's, as a copy between them does."""
    if first != then:
        moment = Device.clocks.moment(Device.streams.current(first).number)
        Device.clocks.stream_waits(Device.streams.current(then).number, moment)


def _wait_for_current(tensor: DeviceTensor) -> None:
    stream = Device.streams.current(tensor.memory.device).number
    Device.clocks.work(stream, [tensor.memory], [])
    Device.clocks.host_waits(Device.clocks.moment(stream))


def pin(tensor: Tensor) -> Tensor:
    """Take the memory of a tensor of the host for pinned."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        Device.pinned[storage.data_ptr()] = weakref.ref(storage)
    return tensor
