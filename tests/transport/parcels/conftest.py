"""Networks with memory of a device: the CPU's here, as the same code uses it."""

import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.ucx import bindings, parcels
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.parcels import ParcelSender, UcxParcels
from tests.transport.conftest import LIMITS, SECRET

CPU = torch.device("cpu")


@pytest.fixture(params=["tcp", "shm", "auto"])
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


@dataclass
class Carrier:
    """Parcels of one connection at one side, and what sends for them."""

    parcels: UcxParcels
    sender: ParcelSender

    def hold_parcels(self) -> list[tuple[Any, int]]:
        """From now on frames leave, and their parcels are kept here."""
        start, held = self.sender.start, list[tuple[Any, int]]()

        def start_frames(memory: Any, tag: int) -> None:
            if tag & parcels.PARCEL:
                held.append((memory, tag))
            else:
                start(memory, tag)

        self.sender.start = start_frames  # type: ignore[method-assign]
        return held

    def note_taken(self) -> list["weakref.ref[Tensor]"]:
        """The memory that is taken for parcels from now on, as long as somebody holds it."""
        take, taken = self.parcels.memory.take, list["weakref.ref[Tensor]"]()

        def note(*size: Any) -> Tensor:
            tensor = take(*size)
            taken.append(weakref.ref(tensor))
            return tensor

        self.parcels.memory.take = note  # type: ignore[method-assign]
        return taken


@pytest.fixture
def carriers(monkeypatch: pytest.MonkeyPatch) -> list[Carrier]:
    """Those that this process makes from now on. A listener makes the one of a connection before the dialler."""
    made: list[Carrier] = []

    def note(sender: ParcelSender, *rest: Any) -> UcxParcels:
        made.append(Carrier(UcxParcels(sender, *rest), sender))
        return made[-1].parcels

    monkeypatch.setattr(bindings, "UcxParcels", note)
    return made


def is_free(taken: list["weakref.ref[Tensor]"]) -> bool:
    """True if nobody holds any of the memory."""
    return all(each() is None for each in taken)


async def echo(request: Frame) -> Frame:
    """Answer with the same tensors, as many of them apart."""
    return request.reply(request.tensors, parcels=request.parcels)
