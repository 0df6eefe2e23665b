"""CUDA's locking of the host's memory on the fake device, and what its kernels read by address."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.gathered import device
from moesaic.experts import slots
from tests.fake_device.tensors import Device, DeviceTensor


@contextmanager
def locked_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tell the fake device of both for the length of a block; at its end no memory may be locked."""

    def register(address: int, nbytes: int, flags: int) -> int:
        assert address not in Device.pinned
        assert nbytes > 0
        Device.pinned[address] = lambda: True
        locked.add(address)
        return flags

    def unregister(address: int) -> int:
        del Device.pinned[address]
        locked.remove(address)
        return 0

    def compute_on_gpu(*arguments: Any) -> Tensor:
        held = [t for mlp in arguments[3].mlps if mlp for part in mlp.parts for t in part.values()]
        number = Device.streams.current(0).number
        Device.clocks.work(number, [t.memory for t in held if isinstance(t, DeviceTensor)], [])
        return compute(*arguments)

    compute, locked = slots.compute_on_gpu, set[int]()
    functions = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(device, "OWN_PAGES_BYTES", 1)
    monkeypatch.setattr(slots, "compute_on_gpu", compute_on_gpu)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: functions)
    yield
    assert not locked
