"""The members of the cluster: leases that processes hold, and a view of all leases."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import structlog
from prometheus_client import Counter

from moesaic.cluster.background import background, tended
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.security.credentials import own_credentials
from moesaic.cluster.waiting import Changes
from moesaic.errors import InvalidInput, PeerLost
from moesaic.messages.bounds import MOST
from moesaic.messages.registry import Generation, RegistryHint, WorkerRecord

log = structlog.get_logger()

LEASE_S = 6
RENEW_S = 2.0
STREAM = "ctl:registry"
_INDEX = "workers"  # a set of worker ids, which saves scans for leases
_GENERATION_S = 30 * 86400  # ids made of random letters must not pile up
_WAIT_S = 1.0
_TIDY_S = 30.0
_MAX_REMEMBERED = 10_000

_replayed = Counter(
    "moesaic_records_refused",
    "Worker records rejected because they are old or belong to another process",
)
_records = msgspec.msgpack.Decoder(WorkerRecord)
_hints = msgspec.msgpack.Decoder(RegistryHint)
_generations = msgspec.msgpack.Decoder(Generation)


def max_age_s() -> float:
    """Return the age from which a record counts as an old one put back; records are written every two seconds."""
    return own_credentials().skew_s + LEASE_S


class Lease:
    """This process's record in the registry."""

    def __init__(self, bus: Bus, record: WorkerRecord) -> None:
        self.record = record
        self._bus, self._held = bus, False
        self._writing = asyncio.Lock()  # a renewal must not put back what an update has changed
        self._later: tuple[int, float] | None = None  # number of a later start's record; when seen

    async def update(self, **changes: Any) -> None:
        """Change fields of the record, such as ``state``; without Redis, as soon as it is back."""
        before, self.record = self.record, msgspec.structs.replace(self.record, **changes)
        if self.record != before:
            await self._announce("changed")

    async def renew(self) -> None:
        """Write the record for another ``LEASE_S``.

        Raises:
            InvalidInput: a later start of this worker id holds the lease.
            PeerLost: Redis did not answer.
        """
        async with self._writing:
            name, record = lease_key(self.record.worker_id), self.record
            [found] = await self._bus.get_written([name], _records)
            held = found[0] if found else None
            if found and found[0].generation > record.generation and self._gives_way(*found):
                return
            self._later = None
            await self._bus.add_member(_INDEX, record.worker_id)
            await self._bus.put(name, record, ttl_s=LEASE_S)
            # New, or Redis had lost it.
            if held is None or held.generation != record.generation:
                log.info("lease.taken", worker_id=record.worker_id, generation=record.generation)
                await self._hint("joined")

    def _gives_way(self, later: WorkerRecord, number: int) -> bool:
        """True while a later start of this worker id may hold the lease.

        One record alone does not show that its process lives.

        Raises:
            InvalidInput: it renews the lease.
        """
        if self._later is None:
            self._later = number, time.monotonic()
        first, since_s = self._later
        if number > first:
            raise InvalidInput(
                "worker_id",
                f"{later.worker_id} is taken by a process started later (pid {later.pid} on "
                f"{later.node or 'an unknown host'}); give each process its own --worker-id",
            )
        return time.monotonic() - since_s < LEASE_S

    async def keep(self) -> None:
        """Renew for ever, through outages of Redis."""
        while True:
            try:
                await self.renew()
                self._held = True
            except PeerLost as error:
                if self._held:
                    log.warning("lease.not_renewed", cause=str(error))
                self._held = False
            await asyncio.sleep(RENEW_S)

    async def release(self) -> None:
        """Give up the lease, if Redis answers and the lease is still ours."""
        name = lease_key(self.record.worker_id)
        with suppress(PeerLost):
            stored = await self._bus.get_content(name, _records)
            held = stored.message
            if held is None or held.generation != self.record.generation:
                return
            # Compared with the value just read: a successor may have taken the lease meanwhile.
            if await self._bus.compare_and_set({name: stored.value}, {name: None}):
                # The index is the scheduler's to tidy.
                await self._hint("left")

    async def _announce(self, event: str) -> None:
        # The next renewal tells it.
        with suppress(PeerLost):
            await self.renew()
            await self._hint(event)

    async def _hint(self, event: Any) -> None:
        record = self.record
        await self._bus.append(
            STREAM,
            RegistryHint(worker_id=record.worker_id, generation=record.generation, event=event),
        )


@asynccontextmanager
async def registered(bus: Bus, record: WorkerRecord) -> AsyncIterator[Lease]:
    """Hold a lease for the length of the block, through any outage of Redis.

    Raises:
        InvalidInput: (in a group) a later start of this worker id holds the lease.
    """
    lease = Lease(bus, record)
    with suppress(PeerLost):
        await lease.renew()
    try:
        async with background(lease.keep(), "lease"):
            yield lease
    finally:
        await lease.release()


class Fleet(Changes):
    """All live records, kept fresh.

    Attributes:
        workers: records by worker id. A record is removed when its lease ends. Records stay while
            Redis is gone and for one lease after it came back, as workers could not renew.
        other_protocol: why each process of another protocol is not among ``workers``, by worker id.
        stale: Redis does not answer, and ``workers`` is its last answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, WorkerRecord] = {}
        self.other_protocol: dict[str, str] = {}
        self.stale = True
        # Generation and number by worker id, and when a record of them was last there.
        self._newest: dict[str, tuple[tuple[int, int], float]] = {}
        self._suspected: set[str] = set()

    async def refresh(self, bus: Bus) -> None:
        """Read all records."""
        try:
            # Who is known is looked for also where the index cannot be read: its lease tells.
            names = sorted({*await bus.members(_INDEX), *self.workers, *self.other_protocol})
            found = await bus.get_written([lease_key(name) for name in names], _records)
        except PeerLost as error:
            if not self.stale:
                log.warning("fleet.stale", cause=str(error))
                self.stale = True
                self.note_change()
            return
        live = {
            name: one[0]
            for name, one in zip(names, found, strict=True)
            if one and self._is_current(bus, name, *one)
        }
        # They may not have had time to come back.
        if time.monotonic() < bus.last_lost + LEASE_S:
            live = {**self.workers, **live}
        other_protocol = {name: why for name, record in live.items() if (why := record.unlike_us)}
        for name in other_protocol.keys() - self.other_protocol:
            log.warning("fleet.other_protocol", worker_id=name, cause=other_protocol[name])
        live = {name: record for name, record in live.items() if name not in other_protocol}
        if live != self.workers or other_protocol != self.other_protocol or self.stale:
            self.workers, self.other_protocol, self.stale = live, other_protocol, False
            self.note_change()

    def _is_current(self, bus: Bus, name: str, record: WorkerRecord, number: int) -> bool:
        """Tell a worker's newest record from an old one that was put back."""
        stamp, now_s = (record.generation, number), time.monotonic()
        newest, seen_s = self._newest.get(name, (stamp, now_s))
        if (
            record.worker_id != name
            or bus.age_s(number) > max_age_s()
            or (stamp < newest and now_s - seen_s < LEASE_S)
        ):
            _replayed.inc()
            # It is read again every second or two.
            if name not in self._suspected:
                self._suspected.add(name)
                log.error("record.refused", worker_id=name, age_s=round(bus.age_s(number), 1))
            return False
        self._suspected.discard(name)
        # Older records are refused by their age.
        if len(self._newest) > _MAX_REMEMBERED:
            self._newest = {
                known: (last, at_s)
                for known, (last, at_s) in self._newest.items()
                if bus.age_s(last[1]) < max_age_s()
            }
        self._newest[name] = stamp, now_s
        return True


@asynccontextmanager
async def watch_fleet(bus: Bus) -> AsyncIterator[Fleet]:
    """Keep a view of the registry for the length of the block; filled at once if Redis answers."""
    fleet = Fleet()

    async def follow() -> None:
        async for _ in bus.watch(STREAM, _hints):
            await fleet.refresh(bus)

    await fleet.refresh(bus)
    async with tended(follow, "fleet"):
        yield fleet


async def next_generation(bus: Bus, worker_id: str) -> int:
    """Draw a number that grows with every start of this worker id; wait for Redis if it is gone.

    The number is at least the time of day in seconds, so that a Redis that lost its data gives no
    number twice.
    """
    name = f"generation:{worker_id}"
    while True:
        try:
            stored = await bus.get_content(name, _generations)
            last, generation = stored.message, int(time.time())
            if last and last.generation < MOST:
                generation = max(last.generation + 1, generation)
            value = bus.sealed(name, Generation(generation=generation))
            if await bus.compare_and_set({name: stored.value}, {name: value}, ttl_s=_GENERATION_S):
                return generation
        except PeerLost as error:
            log.warning("service.waiting", waiting_for=str(error))
            await asyncio.sleep(_WAIT_S)


async def tidy_index(bus: Bus) -> None:
    """Remove ids of vanished processes from the index, for ever.

    Only the scheduler may do so: without its id, a worker is hidden from every view.
    """
    gone: set[str] = set()
    while True:
        with suppress(PeerLost):
            names = await bus.members(_INDEX)
            found = await bus.get_written([lease_key(name) for name in names], _records)
            absent = {name for name, one in zip(names, found, strict=True) if one is None}
            # Absent twice: a worker that starts is in the index first.
            await bus.remove_member(_INDEX, *absent & gone)
            gone = absent
        await asyncio.sleep(_TIDY_S)


async def leased(bus: Bus, worker_ids: Iterable[str]) -> list[str]:
    """List those ids whose lease is held, under this cluster's secret or another."""
    return [name for name in worker_ids if await bus.get_bytes(lease_key(name)) is not None]


def lease_key(worker_id: str) -> str:
    """Name the document of a worker's record."""
    return f"worker:{worker_id}"
