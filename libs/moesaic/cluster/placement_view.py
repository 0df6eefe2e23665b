"""The committed placement, as every process sees it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.changes import Changes
from moesaic.errors import PeerLost
from moesaic.messages.placement import Placement, PlacementHint

log = structlog.get_logger()

STREAM = "ctl:placement"
POINTER = "placement:current"  # holds the epoch, in digits

_documents = msgspec.msgpack.Decoder(Placement)
_hints = msgspec.msgpack.Decoder(PlacementHint)


class PlacementView(Changes):
    """The last committed placement this process knows; its epoch never goes back.

    Attributes:
        current: none until the first was committed. It stays while Redis is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Placement | None = None

    @property
    def epoch(self) -> int:
        """The current epoch; 0 before the first."""
        return self.current.epoch if self.current else 0

    def accept(self, placement: Placement) -> None:
        """Take a committed placement, unless it is not newer than the current one."""
        if placement.epoch > self.epoch:
            self.current = placement
            log.info("placement.seen", epoch=placement.epoch)
            self.note_change()

    async def refresh(self, bus: Bus) -> None:
        """Follow the pointer."""
        epoch = await committed_epoch(bus)
        if epoch > self.epoch:
            placement = await bus.get(document(epoch), _documents)
            if placement is not None:
                self.accept(placement)


@asynccontextmanager
async def watch_placement(bus: Bus) -> AsyncIterator[PlacementView]:
    """A view of the placement for the length of the block; filled, if Redis answers, at once."""
    view = PlacementView()

    async def follow() -> None:
        async for _ in bus.watch(STREAM, _hints):
            with suppress(PeerLost):
                await view.refresh(bus)

    with suppress(PeerLost):
        await view.refresh(bus)
    async with background(follow(), "placement"):
        yield view


async def committed_epoch(bus: Bus) -> int:
    """The epoch the pointer names; 0 if there is none."""
    value = await bus.get_bytes(POINTER)
    return int(value) if value and value.isdigit() else 0


def document(epoch: int) -> str:
    """The name of the placement's document of an epoch."""
    return f"placement:{epoch}"
