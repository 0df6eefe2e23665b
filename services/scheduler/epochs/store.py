"""Epochs and the committed placement in Redis: allocated once, never reused, never lost."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import grpc
import structlog
from prometheus_client import Gauge

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.placement_view import (
    POINTER,
    STREAM,
    PlacementView,
    document,
    documents,
)
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.rpc.channels import CONTROL_TIMEOUT_S, channel
from moesaic.errors import NotReady, PeerLost
from moesaic.messages.placement import Placement, PlacementHint
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import admin_pb2, admin_pb2_grpc

log = structlog.get_logger()

_COUNTER = "placement:epoch"  # the highest epoch ever allocated, committed or not
MOST_AHEAD = 1 << 32  # of a stored epoch; a placement a second takes a century
_KEEP_OLD_S = 3600  # how long the document of the epoch before can still be read

_epoch = Gauge("moesaic_placement_epoch", "Epoch of the committed placement")


class EpochStore:
    """Writes epochs and placements for the leader; every write is fenced by the leader's lease."""

    def __init__(self, bus: Bus, leadership: Leadership, view: PlacementView) -> None:
        self._bus, self._leadership, self._view = bus, leadership, view
        self.floor = 0  # some worker has seen this epoch
        self._given_out = 0  # by this process, the last one

    async def allocate(self) -> int:
        """Allocate an epoch greater than any that a scheduler or worker has seen.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        (stored, last), (_, pointed) = await self._read(_COUNTER), await self._read(POINTER)
        epoch = max(last, pointed, self._known) + 1
        await self.write({_COUNTER: stored}, {_COUNTER: b"%d" % epoch})
        self._given_out = epoch
        return epoch

    async def commit(self, placement: Placement) -> None:
        """Commit a prepared placement; after this no earlier one can be committed.

        Only the last allocated epoch can be committed: workers drop what they prepared for earlier ones. So a
        scheduler that lost the lead and won it back cannot commit an earlier placement.

        Raises:
            NotReady: another scheduler leads now, or has committed or prepared another one.
            PeerLost: Redis did not answer, and the outcome is unknown.
        """
        before = self._view.current
        (pointer, pointed), (given_out, last) = (
            await self._read(POINTER),
            await self._read(_COUNTER),
        )
        if pointed >= placement.epoch:
            raise NotReady(f"epoch {pointed} was committed by another scheduler")
        if last != placement.epoch:
            raise NotReady(f"the epoch given out last is {last}, no longer {placement.epoch}")
        await self.write({POINTER: pointer, _COUNTER: given_out}, self._documents(placement))
        self._view.accept(placement)
        _epoch.set(placement.epoch)
        # It is committed; readers also look by themselves.
        with suppress(PeerLost):
            await self._bus.append(STREAM, PlacementHint(epoch=placement.epoch))
            if before is not None:
                await self._bus.put(document(before.epoch), before, ttl_s=_KEEP_OLD_S)

    async def agree(self) -> None:
        """Take the placement from Redis, or restore it there if it cannot be read.

        Raises:
            NotReady: another scheduler leads now.
            PeerLost: Redis did not answer.
        """
        await self._view.refresh(self._bus)
        current = self._view.current
        if current is None:
            return
        _epoch.set(current.epoch)
        (pointer, pointed), (stored, last) = await self._read(POINTER), await self._read(_COUNTER)
        found = await self._bus.get(document(current.epoch), documents)
        if pointed == current.epoch and found == current:
            return
        if pointed > current.epoch:
            await self._view.refresh(self._bus)
            # It came meanwhile
            if self._view.epoch >= pointed:
                return
        counter = b"%d" % max(last, current.epoch, self._given_out)
        values = {**self._documents(current), _COUNTER: counter}
        await self.write({POINTER: pointer, _COUNTER: stored}, values)
        log.warning("placement.republished", epoch=current.epoch)
        await self._bus.append(STREAM, PlacementHint(epoch=current.epoch))

    async def learn_from(self, records: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Raise the lowest next epoch above those that workers have seen; only these remain if Redis
        lost its data.

        Returns:
            The workers that did not answer.
        """
        asked = [record for record in records if record.role != "scheduler"]
        seen = await asyncio.gather(*(_epoch_seen(record) for record in asked))
        self.floor = max([self.floor, *(epoch or 0 for epoch in seen)])
        return [record for record, epoch in zip(asked, seen, strict=True) if epoch is None]

    def _documents(self, placement: Placement) -> dict[str, bytes | None]:
        name = document(placement.epoch)
        return {name: self._bus.sealed(name, placement), POINTER: b"%d" % placement.epoch}

    @property
    def _known(self) -> int:
        return max(self._view.epoch, self.floor, self._given_out)

    async def _read(self, name: str) -> tuple[bytes | None, int]:
        """Read an epoch. It has no seal, so a value far ahead of all known epochs is rejected as
        forged.

        Returns:
            Its value, for ``write``, and the epoch; 0 if there is none.
        """
        value, number = await self._bus.get_number(name)
        if number is not None and number > self._known + MOST_AHEAD:
            await self._bus.refuse(name, value or b"", f"it is more than {MOST_AHEAD} epochs ahead")
            number = None
        return value, number or 0

    async def write(
        self, expected: dict[str, bytes | None], values: dict[str, bytes | None]
    ) -> None:
        """Set ``values`` together if this process leads and all of ``expected`` still hold.

        Raises:
            NotReady: another scheduler leads now, or has written meanwhile.
            PeerLost: Redis did not answer.
        """
        fenced = {**self._leadership.fence, **expected}
        if await self._bus.compare_and_set(fenced, values):
            return
        # A Redis that lost its data lost the lease as well.
        await self._leadership.contend()
        if not (self._leadership.held and await self._bus.compare_and_set(fenced, values)):
            raise NotReady("another scheduler leads now, or wrote at the same time")


async def _epoch_seen(record: WorkerRecord) -> int | None:
    """The highest epoch that a worker has seen; None if it does not answer."""
    try:
        async with channel(record.admin_address, record.worker_id) as connection:
            stub = admin_pb2_grpc.AdminServiceStub(connection)
            info = await stub.GetInfo(admin_pb2.GetInfoRequest(), timeout=CONTROL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    return int(info.epoch)
