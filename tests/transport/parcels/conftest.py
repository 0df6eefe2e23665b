"""Networks with memory of a device: the CPU's here, as the same code uses it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.conftest import LIMITS, SECRET

CPU = torch.device("cpu")


@pytest.fixture(params=["tcp", "shm"])
def transports(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def open_one(transports: str) -> AsyncIterator[Callable[..., UcxNetwork]]:
    """Opens networks, and closes them at the end."""
    opened = []

    def make(worker_id: str, device: Any = CPU, limits: FrameLimits = LIMITS) -> UcxNetwork:
        kind: Any = transports
        made = UcxNetwork(worker_id, "expert", SECRET, limits, kind, device=device)
        opened.append(made)
        return made

    yield make
    for network in opened:
        await network.close()


async def echo(request: Frame) -> Frame:
    """Answer with the same tensors, as many of them apart."""
    return request.reply(request.tensors, parcels=request.parcels)
