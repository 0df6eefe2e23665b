"""What links stand on: something that carries whole messages, in order, between two authenticated ends."""

from typing import Protocol

from moesaic.transport.frame import Message


class Receiver(Protocol):
    """Who a wire reports to; each call comes from the event loop, never from inside ``send`` or ``close``."""

    def on_message(self, message: Message) -> None:
        """Take a message; its memory is the receiver's."""
        ...

    def on_lost(self, cause: str) -> None:
        """Learn that nothing more will come or go; said at most once, and not after ``close``."""
        ...


class Wire(Protocol):
    """Carries messages to one peer; after ``close``, or once lost, it carries nothing either way."""

    def send(self, message: Message) -> None:
        """Start sending; the memory belongs to the wire from here on."""
        ...

    def close(self) -> None:
        """Abort what is under way, both ways; calling it again changes nothing."""
        ...
