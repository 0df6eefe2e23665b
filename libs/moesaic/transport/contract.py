"""The promises of every network and link; engines do not know which one carries their frames."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from moesaic.errors import MoesaicError
from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.frame import Frame
from moesaic.transport.rings.channel import Channel

Handler = Callable[[Frame], Frame | Awaitable[Frame]]
"""Serves one REQUEST and returns its REPLY, which repeats the request's identity (``request_id``,
``seq``, ``epoch``, ``layer``). A ``MoesaicError`` travels back as an ERROR frame. A handler that need
not wait should return the frame itself: it leaves in the same turn of the event loop."""


@runtime_checkable
class Link(Protocol):
    """The dialling side of one authenticated connection."""

    @property
    def peer(self) -> str:
        """Worker id of the other end, proved by the handshake."""
        ...

    @property
    def alive(self) -> bool:
        """True while the link can be used; False is final."""
        ...

    @property
    def channel(self) -> Channel | None:
        """The channel that carries it, by which C functions may send and receive; None: Python alone does."""
        ...

    @property
    def memory(self) -> DeviceMemory | None:
        """The device memory in which parcels of replies arrive; None: all tensors travel within frames."""
        ...

    def post(self, frame: Frame) -> None:
        """Send a NOTE, to which no answer ever comes.

        Raises:
            PeerLost: the link is closed.
            InvalidInput: the frame cannot be written.
        """
        ...

    async def probe(self, nbytes: int, deadline_s: float) -> float:
        """Measure the time of a message with ``nbytes`` after its header and of the empty answer.

        Returns:
            Seconds.

        Raises:
            DeadlineExceeded: it took longer than ``deadline_s``; the link stays.
            PeerLost: the link is closed, or ended meanwhile.
        """
        ...

    def discard(self, cause: str) -> None:
        """Close now: outstanding calls fail with ``PeerLost``, and late answers are dropped."""
        ...


@runtime_checkable
class Network(Protocol):
    """One process's access to its peers. Every method is called on the one event loop that owns it."""

    async def listen(self, host: str, port: int, handler: Handler) -> str:
        """Serve peers that prove the cluster secret; port 0 takes a free one.

        Returns:
            The ``host:port`` bound.

        Raises:
            InUse: the address cannot be listened on.
        """
        ...

    async def connect(self, address: str, peer: str, deadline_s: float) -> Link:
        """Dial ``address``; both ends prove the cluster secret to each other.

        Raises:
            DeadlineExceeded: it took longer than ``deadline_s``.
            PeerLost: there is no answer, the secret differs, or the worker there is not ``peer``.
        """
        ...

    async def exchange(
        self, calls: Sequence[tuple[Link, Frame]], deadline_s: float
    ) -> list[Frame | MoesaicError]:
        """Send all frames and wait for all replies.

        Frames outstanding on one link at the same time need different ``seq``. A link whose answer is
        missing at the deadline, or when the exchange is cancelled, is discarded with its late answer.

        Returns:
            In the order of ``calls`` each reply, or the error of that call: none is raised.
        """
        ...

    @property
    def linking(self) -> bool:
        """True while handshakes are in progress; work on the same event loop should leave them time."""
        ...

    async def linked(self) -> None:
        """Wait until no handshake is in progress."""
        ...

    @property
    def served_peers(self) -> list[str]:
        """Worker ids of the peers that this network serves now, sorted."""
        ...

    async def all_left(self, besides: Collection[str] = ()) -> None:
        """Wait until this network serves no peer but those with worker ids in ``besides``."""
        ...

    @property
    def bell(self) -> int:
        """The file descriptor that peers wake exchanges without Python by; -1: there are none."""
        ...

    @property
    def channels(self) -> tuple[Any, int]:
        """All channels, as an array for C functions, and their number; valid until one comes or goes."""
        ...

    async def close(self) -> None:
        """Discard all links and stop serving; calling it again changes nothing."""
        ...
