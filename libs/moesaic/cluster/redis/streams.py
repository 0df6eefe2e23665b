"""Streams in Redis: entries that hint at news, appended, watched and read on."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog

from moesaic.cluster.redis.clients import BLOCK_S
from moesaic.cluster.redis.connection import RedisConnection
from moesaic.cluster.redis.entries import EntryReader, Fields
from moesaic.cluster.redis.seals import SealBroken
from moesaic.cluster.waiting.backoff import Backoff
from moesaic.errors import PeerLost

log = structlog.get_logger()
T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder

_RETENTION_MS = 3600_000  # stream entries are hints; an hour of them is for people
_BEGINNING = b"0-0"  # the place before every entry of a stream


class Streams:
    """The streams of one cluster.

    Attributes:
        connection: to the cluster's Redis.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection
        self._newest_ms: dict[str, int] = {}  # by stream, by Redis's clock

    async def append(
        self, stream: str, message: msgspec.Struct, *, max_entries: int | None = None
    ) -> None:
        """Add an entry to a stream and trim the stream.

        Args:
            stream: its name.
            message: of the entry.
            max_entries: about so many entries stay; None keeps those of the last hour.

        Raises:
            PeerLost: Redis did not do it within a second; it may have been done.
        """
        newest_ms = self._newest_ms.get(stream)
        by_age = max_entries is None and newest_ms is not None
        with self.connection.noting_outages():
            entry_id = await self.connection.client.xadd(
                self.connection.key(stream),
                {
                    "t": str(type(message).__struct_config__.tag),
                    "p": self.connection.seals.seal(stream, msgspec.msgpack.encode(message)),
                },
                minid=max(0, (newest_ms or 0) - _RETENTION_MS) if by_age else None,
                maxlen=max_entries,
                approximate=True,
            )
        self._newest_ms[stream] = int(entry_id.split(b"-")[0])

    async def watch(self, stream: str, decoder: Decoder[T]) -> AsyncIterator[T | None]:
        """Give every entry from now on; the iterator never ends.

        It gives ``None`` where the reader should look at the documents: at the start, after two
        seconds without news, for an entry that cannot be read, and each time Redis was lost or
        came back.
        """
        entry_reader = EntryReader(self.connection, stream, decoder, repeats=True)
        last_id: bytes | None = None
        backoff = Backoff()
        while True:
            try:
                with self.connection.noting_outages():
                    if last_id is None:
                        last_id = await self._newest_id(stream)
                        entries = []
                    else:
                        entries = await self._after(stream, last_id)
                backoff.reset()
            except PeerLost as error:
                log.debug("redis.lost", cause=error.cause)
                last_id, entries = None, []  # a Redis that lost its data counts its own ids
                await backoff.pause()
            for entry_id, fields in entries:
                last_id = entry_id
                yield await entry_reader.read(entry_id, fields)
            if not entries:
                yield None

    async def read_on(self, stream: str, decoder: Decoder[T]) -> AsyncGenerator[T | None, None]:
        """Give every entry that is there, oldest first, and every later one; the iterator never ends.

        It gives ``None`` after two seconds without news, and when Redis was lost. Each entry is
        given once, even if another process appends its copy. A Redis that lost its data is read
        from its beginning.
        """
        entry_reader = EntryReader(self.connection, stream, decoder, repeats=False)
        last_id, was_lost, backoff = _BEGINNING, False, Backoff()
        while True:
            try:
                with self.connection.noting_outages():
                    if was_lost and _place(await self._newest_id(stream)) < _place(last_id):
                        last_id = _BEGINNING
                    entries = await self._after(stream, last_id)
                was_lost = False
                backoff.reset()
            except PeerLost as error:
                log.debug("redis.lost", cause=error.cause)
                was_lost, entries = True, []
                await backoff.pause()
            for entry_id, fields in entries:
                last_id = entry_id
                message = await entry_reader.read(entry_id, fields)
                if message is not None:
                    yield message
            if not entries:
                yield None

    async def latest(self, stream: str, decoder: Decoder[T], count: int) -> list[T]:
        """Read the last entries of a stream.

        Returns:
            At most ``count`` messages that can be read, oldest first.

        Raises:
            PeerLost: Redis did not answer within a second.
        """
        with self.connection.noting_outages():
            entries = await self.connection.client.xrevrange(
                self.connection.key(stream), count=count
            )
        found = []
        for _, fields in reversed(entries):
            with suppress(msgspec.DecodeError, SealBroken):
                opened = self.connection.seals.open(stream, fields.get(b"p", b""))
                found.append(decoder.decode(opened.message))
        return found

    async def _newest_id(self, stream: str) -> bytes:
        newest = await self.connection.client.xrevrange(self.connection.key(stream), count=1)
        return newest[0][0] if newest else _BEGINNING

    async def _after(self, stream: str, last_id: bytes) -> list[tuple[bytes, Fields]]:
        answer = await self.connection.reader.xread(
            {self.connection.key(stream): last_id}, count=100, block=int(BLOCK_S * 1000)
        )
        return answer[0][1] if answer else []


def _place(entry_id: bytes) -> tuple[int, ...]:
    """Split an entry's id into Redis's time and a number, which order the entries of a stream."""
    return tuple(int(part) for part in entry_id.split(b"-"))
