"""The base of links: a carrier of whole messages, in order, between two authenticated ends."""

from typing import Protocol

from moesaic.transport.frame import Message


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


class Wire(Protocol):
    """Carries messages to one peer; after ``close``, or once lost, none either way."""

    def send(self, message: Message) -> None:
        """Start sending; the memory belongs to the wire from here on."""
        ...

    def close(self) -> None:
        """Abort messages under way, both ways; calling it again changes nothing."""
        ...
