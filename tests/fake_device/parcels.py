"""UCX with the memory of the fake device: it finds it as it is, so it must have been waited for."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.transport.ucx import bindings, parcels, planes
from tests.fake_device.tensors import Device, DeviceTensor


class _Context(bindings.libucxx.UCXContext):  # type: ignore[misc]
    cuda_support = True


def let_ucx_take_the_device(patch: pytest.MonkeyPatch) -> None:
    """Let networks that are opened from now on carry parcels of the fake device."""
    patch.setattr(bindings.libucxx, "UCXContext", _Context)
    patch.setattr(planes, "_with_cuda", lambda options: options)
    patch.setattr(parcels, "_bytes_of", partial(_memory_of, writes=False))
    receive = parcels.UcxParcels.arrived

    def arrived(self: Any, found: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parcels, "_bytes_of", partial(_memory_of, writes=True))
            receive(self, found)

    patch.setattr(parcels.UcxParcels, "arrived", arrived)


def _memory_of(tensor: Tensor, *, writes: bool) -> Any:
    if not isinstance(tensor, DeviceTensor):
        return tensor.view(-1).view(torch.uint8).numpy()
    Device.clocks.host_uses(tensor.memory, writes=writes)
    return tensor.inner.view(-1).view(torch.uint8).numpy()
