"""What every network offers, so that engines do not know which one carries their frames."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from moesaic.errors import MoesaicError
from moesaic.transport.frame import Frame

Handler = Callable[[Frame], Frame | Awaitable[Frame]]
"""Serves one REQUEST and returns its REPLY, which repeats the request's identity (``request_id``, ``seq``, ``epoch``,
``layer``); a ``MoesaicError`` it raises travels back as an ERROR frame. A reply that needs no waiting is best returned
as it is: it leaves in the same turn of the event loop."""


@runtime_checkable
class Link(Protocol):
    """The dialling side of one authenticated connection."""

    @property
    def peer(self) -> str:
        """Worker id of the other end, as it proved it."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the link can still be used; False is final."""
        ...

    def post(self, frame: Frame) -> None:
        """Send a NOTE; whether it comes to anything is never said.

        Raises:
            PeerLost: the link is closed.
            InvalidInput: the frame cannot be written.
        """
        ...

    async def probe(self, nbytes: int, deadline_s: float) -> float:
        """Seconds until a message with ``nbytes`` more than a header is there and an empty answer is back.

        Raises:
            DeadlineExceeded: it took longer than ``deadline_s``; the link stays.
            PeerLost: the link is closed, or ended meanwhile.
        """
        ...

    def discard(self, cause: str) -> None:
        """Close now: what is outstanding fails with ``PeerLost``, and no answer still under way reaches anyone."""
        ...


@runtime_checkable
class Network(Protocol):
    """One process's door to its peers. Lives on one event loop: every method is called there."""

    async def listen(self, host: str, port: int, handler: Handler) -> str:
        """Serve peers that prove the cluster secret; returns the ``host:port`` bound (port 0 takes a free one).

        Raises:
            InvalidInput: the address cannot be bound.
        """
        ...

    async def connect(self, address: str, peer: str, deadline_s: float) -> Link:
        """Dial ``address`` and prove to each other who we are.

        Raises:
            DeadlineExceeded: it took longer than ``deadline_s``.
            PeerLost: nobody answers, the secret differs, or the worker there is not ``peer``.
        """
        ...

    async def exchange(
        self, calls: Sequence[tuple[Link, Frame]], deadline_s: float
    ) -> list[Frame | MoesaicError]:
        """Send all frames and wait for all replies, in the order of ``calls``; never raises for a peer's sake.

        Frames outstanding on one link at the same time need different ``seq``. A link whose answer is missing at the
        deadline, or whose exchange is cancelled, is discarded: an answer that comes later reaches nobody.
        """
        ...

    async def close(self) -> None:
        """Discard all links and stop serving; calling it again changes nothing."""
        ...
