"""Tensors that travel apart from their frames: each is one UCX message, from device memory to device memory.

A frame names its parcels by number, and the tag of each is made of the connection's and this
number. So no parcel is taken for another. The order of frames and parcels and their number in
flight do not matter, nor does a frame that is never read. Frames have tags without ``PARCEL``.

A parcel is received when it has been seen to come, never before. So UCX holds memory of this side only
while bytes are moving into it, and a connection that ends leaves nothing to be cancelled.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.errors import FrameError, InvalidInput
from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.frame import Frame
from moesaic.transport.tensor_table import NUMBERS

PARCEL = 1 << 63  # of tags
PATIENCE_S = 30.0  # for parcels of a frame that is here
MAX_WAITING = 256  # frames of a connection that wait for parcels, and parcels that wait for frames


def frame_tag(tag: int) -> int:
    """The tag of frames on a connection that has parcels."""
    return tag & ~PARCEL


def connection_of(tag: int) -> int:
    """Give the part that all tags of one connection in one direction share, frames' and parcels'."""
    return (tag & ~PARCEL) // NUMBERS


class ParcelSender(Protocol):
    """The part of a connection that parcels need."""

    def send(self, message: bytearray) -> None:
        """Start sending a frame."""

    def start(self, memory: Any, tag: int) -> None:
        """Start sending by this tag; the memory belongs to UCX until the end."""

    def lose(self, cause: str) -> None:
        """Report the end of the connection, in a later turn of the event loop."""


class ParcelReceiver(Protocol):
    """The part of a UCX worker that parcels need; ``found`` was probed and taken out of its queue."""

    def receive(self, found: Any, memory: Any, finish: Callable[[str | None], None]) -> None:
        """Receive a message, then call ``finish`` with the error, if any."""

    def drop(self, found: Any) -> None:
        """Be rid of a message."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A frame that waits for its parcels."""

    frame: Frame
    take: Callable[[Frame], None]
    missing: int
    timer: asyncio.TimerHandle | None = None


class UcxParcels:
    """The parcels of one connection; see ``parcels.Parcels``.

    Attributes:
        memory: memory that they arrive in.
    """

    def __init__(
        self,
        sender: ParcelSender,
        receiver: ParcelReceiver,
        tags: tuple[int, int],
        memory: DeviceMemory,
    ) -> None:
        """Send by the first of the ``tags`` of frames, receive by the other."""
        self.memory = memory
        self._sender, self._receiver = sender, receiver
        self._send_tag, self._receive_tag = (connection_of(tag) * NUMBERS | PARCEL for tag in tags)
        self._sent = 0
        self._wanted: dict[int, tuple[Tensor, _Waiting]] = {}  # by tag
        self._early: dict[int, Any] = {}  # by tag: came before their frames
        self._waiting: set[_Waiting] = set()

    def send(self, frame: Frame) -> None:
        """See ``Parcels.send``."""
        tensors = frame.tensors[: frame.parcels]
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise InvalidInput("tensors", "tensors outside the frame must be contiguous")
        frame.first_parcel = self._sent
        message = frame.encode(apart=True)
        self._sender.send(message)
        for number, tensor in enumerate(tensors, start=self._sent):
            if tensor.numel():
                self._sender.start(_bytes_of(tensor), self._send_tag + number % NUMBERS)
        self._sent = (self._sent + len(tensors)) % NUMBERS

    def fetch(self, frame: Frame, take: Callable[[Frame], None]) -> None:
        """See ``Parcels.fetch``."""
        wanted = {
            self._receive_tag + number % NUMBERS: tensor
            for number, tensor in enumerate(frame.tensors[: frame.parcels], frame.first_parcel)
            if tensor.numel()
        }
        if len(self._waiting) >= MAX_WAITING:
            raise FrameError("tensors", f"of {MAX_WAITING} frames are waited for already")
        if wanted.keys() & self._wanted.keys():
            raise FrameError("first_parcel", f"{frame.first_parcel} is waited for already")
        waiting = _Waiting(frame, take, len(wanted))
        loop = asyncio.get_running_loop()
        self._waiting.add(waiting)
        if not wanted:
            loop.call_soon(self._complete, waiting)
            return
        cause = f"the tensors of a frame did not come within {PATIENCE_S:g} s"
        waiting.timer = loop.call_later(PATIENCE_S, self._sender.lose, cause)
        for tag, tensor in wanted.items():
            self._wanted[tag] = tensor, waiting
            if (found := self._early.pop(tag, None)) is not None:
                self.arrived(found)

    def arrived(self, found: Any) -> None:
        """Take a parcel, as UCX's probe has found it."""
        tag = found.sender_tag.value
        if tag not in self._wanted:
            # Else one without a frame could be taken for another, once numbers begin again.
            if tag in self._early or len(self._early) >= MAX_WAITING:
                self._receiver.drop(found)
                self._sender.lose(f"a tensor came twice, or {MAX_WAITING} without their frames")
            else:
                self._early[tag] = found
            return
        tensor, waiting = self._wanted.pop(tag)
        if found.length != tensor.nbytes:
            self._receiver.drop(found)
            self._sender.lose(f"a tensor of {tensor.nbytes} bytes came as {found.length}")
            return
        self._receiver.receive(found, _bytes_of(tensor), partial(self._received, waiting))

    def close(self, *, drop: bool) -> None:
        """Give back the memory of what has not come, except where UCX writes at this moment.

        UCX may ``drop`` what came too early, unless its worker ends as well.
        """
        for waiting in self._waiting:
            if waiting.timer is not None:
                waiting.timer.cancel()
        early, self._early = self._early, {}
        self._wanted, self._waiting = {}, set()
        for found in early.values() if drop else ():
            self._receiver.drop(found)

    def _received(self, waiting: _Waiting, error: str | None) -> None:
        if error is not None:
            self._sender.lose(f"cannot receive: {error}")
            return
        waiting.missing -= 1
        if not waiting.missing:
            self._complete(waiting)

    def _complete(self, waiting: _Waiting) -> None:
        if waiting not in self._waiting:
            # The connection has ended.
            return
        self._waiting.remove(waiting)
        if waiting.timer is not None:
            waiting.timer.cancel()
        self.memory.hand_over(waiting.frame.tensors[: waiting.frame.parcels])
        waiting.take(waiting.frame)


def _bytes_of(tensor: Tensor) -> Any:
    """The tensor's own memory as UCX's bindings take it: bytes on its device, or of an array."""
    flat = tensor.view(-1).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()
