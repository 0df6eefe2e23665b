"""The base of links: a carrier of whole messages, in order, between two authenticated ends.

The first tensors of a frame may travel apart from it, where the wire can carry them so.
"""

from collections.abc import Callable
from typing import Protocol

from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.frame import Frame, FrameLimits, Message
from moesaic.transport.rings.channel import Channel


class Receiver(Protocol):
    """Receiver of a wire's messages; the event loop calls it, never from inside ``send`` or ``close``."""

    def on_message(self, message: Message) -> None:
        """Take a message; its memory is the receiver's."""
        ...

    def on_lost(self, cause: str) -> None:
        """Note the end of the connection; called at most once, and not after ``close``."""
        ...


class Nobody:
    """A receiver that takes no notice. A closed wire has it: wire and link would otherwise hold each other until
    garbage is looked for, and with them a channel's memory."""

    def on_message(self, message: Message) -> None:
        """Let go of it."""

    def on_lost(self, cause: str) -> None:
        """Take no notice."""


NOBODY = Nobody()


class Parcels(Protocol):
    """Carries the tensors of one connection that travel apart from their frames, both ways.

    Attributes:
        memory: memory that they arrive in.
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


class Wire(Protocol):
    """Carries messages to one peer; after ``close``, or once lost, none either way.

    Attributes:
        receiver: of its messages; set in the turn of the event loop in which the wire is made.
    """

    receiver: Receiver

    @property
    def channel(self) -> Channel | None:
        """The channel that carries it; None: Python alone does."""
        ...

    @property
    def parcels(self) -> Parcels | None:
        """The carrier of tensors apart from their frames; None: all travel within frames."""
        ...

    def send(self, message: Message) -> None:
        """Start sending; the memory belongs to the wire from here on."""
        ...

    def close(self) -> None:
        """Abort messages in flight, both ways; calling it again changes nothing."""
        ...


def send_frame(wire: Wire, frame: Frame) -> None:
    """Send a frame, its parcels apart if ``wire`` can; the device has to be settled before.

    Raises:
        InvalidInput: the frame cannot be written.
    """
    parcels = wire.parcels if frame.parcels else None
    if parcels is None:
        wire.send(frame.encode())
    else:
        parcels.send(frame)


def receive_frame(
    wire: Wire, message: Message, limits: FrameLimits, take: Callable[[Frame], None]
) -> None:
    """Give the frame of a message to ``take``: now, or when its parcels are here.

    Raises:
        FrameError: it is no frame, or not one that this side takes.
    """
    parcels = wire.parcels
    frame = Frame.decode(message, limits, parcels.memory if parcels is not None else None)
    if frame.parcels and parcels is not None:
        parcels.fetch(frame, take)
    else:
        take(frame)
