"""Frames through a wire, whose first tensors travel apart where the wire can carry them so."""

from collections.abc import Callable
from typing import Protocol

from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.frame import Frame, FrameLimits, Message
from moesaic.transport.wire import Wire


class Parcels(Protocol):
    """Carries the tensors of one connection that travel apart from their frames, both ways.

    Attributes:
        memory: that they arrive in.
    """

    memory: DeviceMemory

    def send(self, frame: Frame) -> None:
        """Send a frame and its parcels; these stay unchanged until they have left.

        Raises:
            InvalidInput: the frame cannot be written, or a parcel is not contiguous.
        """
        ...

    def fetch(self, frame: Frame, take: Callable[[Frame], None]) -> None:
        """Receive the parcels of ``frame``, then give it to ``take``; never from within.

        If they do not come, the connection ends.

        Raises:
            FrameError: too many frames wait for theirs, or another waits for the same.
        """
        ...


def parcels_of(wire: Wire) -> Parcels | None:
    """The parcels of a wire; ``None``: it carries all tensors within frames."""
    found: Parcels | None = getattr(wire, "parcels", None)
    return found


def send(wire: Wire, frame: Frame) -> None:
    """Send a frame, its parcels apart if ``wire`` can; the device has to be settled before.

    Raises:
        InvalidInput: the frame cannot be written.
    """
    parcels = parcels_of(wire) if frame.parcels else None
    if parcels is None:
        wire.send(frame.encode())
    else:
        parcels.send(frame)


def receive(
    wire: Wire, message: Message, limits: FrameLimits, take: Callable[[Frame], None]
) -> None:
    """Give the frame of a message to ``take``: now, or when its parcels are here.

    Raises:
        FrameError: it is no frame, or not one that this side takes.
    """
    parcels = parcels_of(wire)
    frame = Frame.decode(message, limits, parcels.memory if parcels is not None else None)
    if frame.parcels and parcels is not None:
        parcels.fetch(frame, take)
    else:
        take(frame)
