"""A GPU that a process does not see is refused before anything listens, with all that its ranks need."""

from typing import Any

import pytest
import torch

from moesaic.errors import UnusableSettings
from moesaic.models.weights.served import find_served_model
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.expert.settings import ExpertSettings


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"device": "cuda:2"}, "cuda:2 is needed, this process sees 2 GPUs"),
        ({"device": "cuda", "tensor_parallel": 4}, "cuda:0 to cuda:3 is needed"),
        ({"device": "cuda:1", "tensor_parallel": 2}, "cuda:1 to cuda:2 is needed"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    tiny_model: Any, settings: dict[str, Any], needed: str
) -> None:
    with pytest.raises(UnusableSettings, match=needed):
        find_served_model(AttentionSettings(model=str(tiny_model.directory), **settings))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_one_that_is_there_is_taken(tiny_model: Any, device: str) -> None:
    directory = str(tiny_model.directory)
    find_served_model(ExpertSettings(model=directory, device=device))
    if device != "cuda:1":
        find_served_model(AttentionSettings(model=directory, device=device, tensor_parallel=2))
    address = {"tensor_parallel": 4, "tensor_parallel_address": "10.0.0.1:29500"}
    find_served_model(AttentionSettings(model=directory, device=device, **address))
