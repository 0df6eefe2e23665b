"""Control metadata over Redis: documents, leases, compare-and-set, and streams that hint at news.

State lives in documents; a stream entry only says that one changed. So a reader that missed
entries, or a Redis that lost them, costs nothing but a look at the documents. Both are sealed with
the cluster's secret (``moesaic.cluster.seals``): what is not, is as good as not there, and counted.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import structlog
from prometheus_client import Counter
from redis.exceptions import RedisError, WatchError

from moesaic.addresses import public_url
from moesaic.cluster.credentials import Credentials, own_credentials
from moesaic.cluster.redis_clients import (
    BLOCK_S,
    COMMAND_TIMEOUT_S,
    CONTROL_PLANE_UP,
    check_redis,
    outages,
    redis_client,
)
from moesaic.cluster.seals import Opened, SealBroken, Seals
from moesaic.errors import NotReady, PeerLost

log = structlog.get_logger()
T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder

_RETENTION_MS = 3600_000  # stream entries are hints; an hour of them is for people
_MAX_DEAD_LETTERS = 1000
_MAX_DEAD_LETTER_BYTES = 4096
_BACKOFF_S = (0.1, 2.0)  # first and longest wait between attempts to reach Redis
_BEGINNING = b"0-0"  # the place before every entry of a stream

_MAX_WRITERS = 10_000  # whose numbers one reader of a stream remembers

_unsealed = Counter(
    "moesaic_redis_refused", "documents and entries that nobody of the cluster wrote", ["what"]
)
_dead_letters = Counter(
    "moesaic_stream_dead_letters", "stream entries that could not be read", ["stream"]
)


class Bus:
    """One cluster's keys on one Redis; every name below is prefixed ``moesaic:{cluster}:``.

    Every call but ``watch`` and ``read_on`` raises ``PeerLost`` when Redis does not do what was asked within a
    second; whether a write was done is then unknown. Nothing is repeated by itself.

    Attributes:
        last_lost: monotonic time at which Redis last failed us; -inf if it never did.
    """

    def __init__(self, redis_url: str, cluster: str, credentials: Credentials) -> None:
        self._seals = Seals(credentials.secret, cluster)
        self._url, self._prefix = redis_url, f"moesaic:{{{cluster}}}:"
        name = f"moesaic-{cluster}"
        self._writer = redis_client(redis_url, name, timeout_s=COMMAND_TIMEOUT_S)
        # Its answers may take as long as a read may block, and some more for the way.
        self._reader = redis_client(redis_url, name, timeout_s=BLOCK_S + 2.0)
        self._newest_ms: dict[str, int] = {}
        self.last_lost = float("-inf")

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        redis_url: str,
        cluster: str,
        waiting_for: list[str] | None = None,
        credentials: Credentials | None = None,
    ) -> AsyncIterator["Bus"]:
        """A bus on a Redis that answers; while it does not, wait and say so.

        Args:
            redis_url: ``redis://``, ``rediss://`` or ``unix://``.
            cluster: keeps clusters on one Redis apart.
            waiting_for: a list for people, such as ``ServiceStatus.waiting_for``; it names Redis
                while this waits.
            credentials: of another cluster than this process's own.

        Raises:
            InvalidInput: the URL is wrong in a way that waiting does not cure.
        """
        await _reachable(redis_url, [] if waiting_for is None else waiting_for)
        bus = cls(redis_url, cluster, credentials or own_credentials())
        CONTROL_PLANE_UP.set(1)
        try:
            yield bus
        finally:
            await bus._writer.aclose()
            await bus._reader.aclose()

    async def put(self, name: str, message: msgspec.Struct, *, ttl_s: int | None = None) -> None:
        """Store a document, for good or for ``ttl_s`` seconds."""
        with self._noting_outages():
            await self._writer.set(self._key(name), self.sealed(name, message), ex=ttl_s)

    async def get(self, name: str, decoder: Decoder[T]) -> T | None:
        """A document; none if it is not there or cannot be read, which is logged."""
        return self.opened(name, await self.get_bytes(name), decoder)

    async def get_written(
        self, names: Iterable[str], decoder: Decoder[T]
    ) -> list[tuple[T, int] | None]:
        """Documents in the order of their names, as ``get`` has them, each with its number: it
        grows with all that one process writes, and is in milliseconds since 1970 by its clock."""
        names = list(names)
        if not names:
            return []
        with self._noting_outages():
            values = await self._writer.mget([self._key(name) for name in names])
        return [
            self._opened(name, value, decoder) for name, value in zip(names, values, strict=True)
        ]

    def sealed(self, name: str, message: msgspec.Struct) -> bytes:
        """A document as it is stored under ``name``."""
        return self._seals.seal(name, msgspec.msgpack.encode(message))

    def opened(self, name: str, value: bytes | None, decoder: Decoder[T]) -> T | None:
        """The document in a value that is stored under ``name``; none, which is logged, if nobody
        of this cluster wrote it there, or it cannot be read."""
        found = self._opened(name, value, decoder)
        return found[0] if found else None

    def age_s(self, number: int) -> float:
        """How long ago something with this number was written, by the writer's clock and ours."""
        return self._seals.age_s(number)

    def _opened(self, name: str, value: bytes | None, decoder: Decoder[T]) -> tuple[T, int] | None:
        if value is None:
            return None
        try:
            opened = self._seals.open(name, value)
            return decoder.decode(opened.message), opened.number
        except SealBroken as error:
            _unsealed.labels("document").inc()
            log.error("document.refused", name=name, cause=str(error))
        except msgspec.DecodeError as error:
            log.error("document.refused", name=name, cause=str(error))
        return None

    async def get_bytes(self, name: str) -> bytes | None:
        """A value as ``compare_and_set`` writes it, sealed or not."""
        with self._noting_outages():
            value: bytes | None = await self._writer.get(self._key(name))
        return value

    async def delete(self, name: str) -> None:
        """Remove a key; nothing happens if it is not there."""
        with self._noting_outages():
            await self._writer.delete(self._key(name))

    async def add_member(self, name: str, member: str) -> None:
        """Put a member into a set."""
        with self._noting_outages():
            await self._writer.sadd(self._key(name), member)

    async def remove_member(self, name: str, member: str) -> None:
        """Take a member out of a set."""
        with self._noting_outages():
            await self._writer.srem(self._key(name), member)

    async def members(self, name: str) -> list[str]:
        """The members of a set, sorted."""
        with self._noting_outages():
            found = await self._writer.smembers(self._key(name))
        return sorted(member.decode(errors="replace") for member in found)

    async def compare_and_set(
        self,
        expected: Mapping[str, bytes | None],
        values: Mapping[str, bytes | None],
        *,
        ttl_s: int | None = None,
    ) -> bool:
        """Set ``values`` together if all of ``expected`` still hold; ``None`` is an absent key.

        Returns:
            Whether they were set. If not, nothing was.
        """
        watched = [self._key(name) for name in expected]
        with self._noting_outages():
            async with self._writer.pipeline(transaction=True) as transaction:
                await transaction.watch(*watched)
                if await transaction.mget(watched) != list(expected.values()):
                    return False
                transaction.multi()
                for name, value in values.items():
                    if value is None:
                        transaction.delete(self._key(name))
                    else:
                        transaction.set(self._key(name), value, ex=ttl_s)
                try:
                    await transaction.execute()
                except WatchError:
                    return False
        return True

    async def append(
        self, stream: str, message: msgspec.Struct, *, max_entries: int | None = None
    ) -> None:
        """Add an entry to a stream, and trim what is older than an hour, or what is more than
        about ``max_entries``."""
        newest_ms = self._newest_ms.get(stream)  # Redis's clock, not ours
        by_age = max_entries is None and newest_ms is not None
        with self._noting_outages():
            entry_id = await self._writer.xadd(
                self._key(stream),
                {
                    "t": str(type(message).__struct_config__.tag),
                    "p": self.sealed(stream, message),
                },
                minid=max(0, (newest_ms or 0) - _RETENTION_MS) if by_age else None,
                maxlen=max_entries,
                approximate=True,
            )
        self._newest_ms[stream] = int(entry_id.split(b"-")[0])

    async def watch(self, stream: str, decoder: Decoder[T]) -> AsyncIterator[T | None]:
        """Every entry from now on, and ``None`` whenever the reader should look for itself.

        That is at the start, after two seconds without news, and each time Redis was lost or came
        back. An entry that cannot be read goes to ``dlq:<stream>``. The iterator never ends.
        """
        last_id: bytes | None = None
        backoff_s = _BACKOFF_S[0]
        while True:
            try:
                with self._noting_outages():
                    if last_id is None:
                        last_id = await self._newest_id(stream)
                        entries = []
                    else:
                        entries = await self._read(stream, last_id)
                backoff_s = _BACKOFF_S[0]
            except PeerLost as error:
                log.debug("redis.lost", cause=error.cause)
                last_id, entries = None, []  # a Redis that lost its data counts its own ids
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
            for entry_id, fields in entries:
                last_id = entry_id
                opened = await self._unsealed(stream, entry_id, fields)
                message: T | None = None
                if opened is not None:
                    message = await self._decoded(stream, entry_id, fields, opened.message, decoder)
                yield message
            if not entries:
                yield None

    async def read_on(self, stream: str, decoder: Decoder[T]) -> AsyncGenerator[T | None, None]:
        """Every entry that is there, oldest first, and every later one; ``None`` after two seconds
        without news, and when Redis was lost. What was appended once is given once, even if
        somebody else appends it again.

        Entries that cannot be read go to ``dlq:<stream>``. A Redis that lost its data is read from
        its beginning. The iterator never ends.
        """
        last_id, was_lost, backoff_s = _BEGINNING, False, _BACKOFF_S[0]
        newest: dict[bytes, int] = {}  # number, by writer
        while True:
            try:
                with self._noting_outages():
                    if was_lost and _place(await self._newest_id(stream)) < _place(last_id):
                        last_id = _BEGINNING
                    entries = await self._read(stream, last_id)
                was_lost, backoff_s = False, _BACKOFF_S[0]
            except PeerLost as error:
                log.debug("redis.lost", cause=error.cause)
                was_lost, entries = True, []
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
            for entry_id, fields in entries:
                last_id = entry_id
                opened = await self._unsealed(stream, entry_id, fields)
                if opened is None or not _is_new(opened, newest):
                    continue
                message: T | None = await self._decoded(
                    stream, entry_id, fields, opened.message, decoder
                )
                if message is not None:
                    yield message
            if not entries:
                yield None

    async def latest(self, stream: str, decoder: Decoder[T], count: int) -> list[T]:
        """The last entries of a stream that can be read, oldest first."""
        with self._noting_outages():
            entries = await self._writer.xrevrange(self._key(stream), count=count)
        found = []
        for _, fields in reversed(entries):
            with suppress(msgspec.DecodeError, SealBroken):
                opened = self._seals.open(stream, fields.get(b"p", b""))
                found.append(decoder.decode(opened.message))
        return found

    async def _newest_id(self, stream: str) -> bytes:
        newest = await self._writer.xrevrange(self._key(stream), count=1)
        return newest[0][0] if newest else _BEGINNING

    async def _read(self, stream: str, last_id: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer = await self._reader.xread(
            {self._key(stream): last_id}, count=100, block=int(BLOCK_S * 1000)
        )
        return answer[0][1] if answer else []

    async def _unsealed(
        self, stream: str, entry_id: bytes, fields: dict[bytes, bytes]
    ) -> Opened | None:
        value = fields.get(b"p", b"")
        try:
            return self._seals.open(stream, value)
        except SealBroken as error:
            _unsealed.labels("entry").inc()
            await self._dead_letter(stream, entry_id, value, str(error))
            return None

    async def _decoded(
        self,
        stream: str,
        entry_id: bytes,
        fields: dict[bytes, bytes],
        payload: bytes,
        decoder: Decoder[T],
    ) -> T | None:
        try:
            return decoder.decode(payload)
        except msgspec.DecodeError as error:
            tag = fields.get(b"t", b"").decode(errors="replace")
            if _another_version(tag, decoder):  # a newer peer's; the documents tell the rest
                log.warning("entry.version_unknown", stream=stream, type=tag)
                return None
            await self._dead_letter(stream, entry_id, payload, str(error))
            return None

    async def _dead_letter(self, stream: str, entry_id: bytes, payload: bytes, why: str) -> None:
        _dead_letters.labels(stream).inc()
        log.error("entry.refused", stream=stream, entry_id=entry_id.decode(), cause=why)
        # All readers of the stream meet this entry. Under its own id Redis keeps only the first.
        with suppress(RedisError, OSError):
            await self._writer.xadd(
                self._key(f"dlq:{stream}"),
                {"p": payload[:_MAX_DEAD_LETTER_BYTES], "why": why[:200]},
                id=entry_id,
                maxlen=_MAX_DEAD_LETTERS,
                approximate=True,
            )

    @contextmanager
    def _noting_outages(self) -> Iterator[None]:
        try:
            with outages(self._url):
                yield
        except PeerLost:
            self.last_lost = time.monotonic()
            raise

    def _key(self, name: str) -> str:
        return self._prefix + name


async def _reachable(redis_url: str, waiting_for: list[str]) -> None:
    said, cause, backoff_s = f"redis at {public_url(redis_url)}", "", _BACKOFF_S[0]
    while True:
        try:
            await check_redis(redis_url)
        except NotReady as error:
            if said not in waiting_for:
                waiting_for.append(said)
            if cause != (cause := str(error)):
                log.warning("service.waiting", waiting_for=cause)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
        else:
            if said in waiting_for:
                waiting_for.remove(said)
            return


def _is_new(opened: Opened, newest: dict[bytes, int]) -> bool:
    """Whether its writer has written nothing later that was read; remembers that it was read."""
    if opened.number <= newest.get(opened.writer, -1):
        _unsealed.labels("repeated").inc()
        return False
    newest.pop(opened.writer, None)  # who wrote last stands last
    newest[opened.writer] = opened.number
    if len(newest) > _MAX_WRITERS:
        del newest[next(iter(newest))]
    return True


def _another_version(tag: str, decoder: Decoder[Any]) -> bool:
    known = getattr(getattr(decoder.type, "__struct_config__", None), "tag", None)
    return isinstance(known, str) and tag != known and _kind(tag) == _kind(known)


def _kind(tag: str) -> str:
    return tag.rpartition(".v")[0]


def _place(entry_id: bytes) -> tuple[int, ...]:
    """Where in its stream an entry is: Redis's time, and a number."""
    return tuple(int(part) for part in entry_id.split(b"-"))
