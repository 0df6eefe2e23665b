"""The committed placement, as every process sees it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from moesaic.cluster.background import tended
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.waiting import Changes
from moesaic.errors import PeerLost
from moesaic.messages.placement import Placement, PlacementHint

log = structlog.get_logger()

STREAM = "ctl:placement"
POINTER = "placement:current"  # holds the epoch, in digits

documents = msgspec.msgpack.Decoder(Placement)
_hints = msgspec.msgpack.Decoder(PlacementHint)


class PlacementView(Changes):
    """The last committed placement that this process knows; its epoch never decreases.

    Attributes:
        current: None until the first is committed; it stays while Redis is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Placement | None = None

    @property
    def epoch(self) -> int:
        """The current epoch; 0 before the first."""
        return self.current.epoch if self.current else 0

    def accept(self, placement: Placement) -> None:
        """Adopt a committed placement that is newer than the current one."""
        if placement.epoch > self.epoch:
            self.current = placement
            log.info("placement.seen", epoch=placement.epoch)
            self.note_change()

    async def refresh(self, bus: Bus) -> None:
        """Read the placement that the pointer names, if it is newer.

        The pointer has no seal; only the sealed document counts.
        """
        epoch = await committed_epoch(bus)
        if epoch > self.epoch:
            placement = await bus.get(document(epoch), documents)
            if placement is not None and placement.epoch == epoch:
                self.accept(placement)


@asynccontextmanager
async def watch_placement(bus: Bus) -> AsyncIterator[PlacementView]:
    """Keep a view of the placement for the length of the block; filled at once if Redis answers."""
    view = PlacementView()

    async def follow() -> None:
        async for _ in bus.watch(STREAM, _hints):
            with suppress(PeerLost):
                await view.refresh(bus)

    with suppress(PeerLost):
        await view.refresh(bus)
    async with tended(follow, "placement"):
        yield view


async def committed_epoch(bus: Bus) -> int:
    """Read the epoch that the pointer names; 0 if there is none."""
    return (await bus.get_number(POINTER)).message or 0


def document(epoch: int) -> str:
    """Name the document of an epoch's placement."""
    return f"placement:{epoch}"
