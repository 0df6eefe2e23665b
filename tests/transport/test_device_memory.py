"""Devices by the names that settings give them."""

import pytest
import torch

from moesaic.transport.device_memory import device_named


@pytest.mark.parametrize(
    ("name", "device"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_cuda_device_has_an_index_as_torch_wants_it(name: str, device: str) -> None:
    assert device_named(name) == torch.device(device)
