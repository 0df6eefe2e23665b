"""Streams in Redis: entries that hint at news, appended, watched and read on."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from redis.exceptions import ResponseError

from moesaic.cluster.redis.connection import AHEAD_MS, BLOCK_S, CommandRefused, RedisConnection
from moesaic.cluster.redis.dead_letters import DeadLetters
from moesaic.cluster.redis.reading import Decoder, Unreadable, read_message
from moesaic.cluster.redis.seals import REFUSED, Opened
from moesaic.cluster.waiting import Backoff
from moesaic.errors import PeerLost

log = structlog.get_logger()
T = TypeVar("T")
Fields = dict[bytes, bytes]
"""Fields of an entry: ``t`` is the tag of the message's type, ``p`` the sealed message."""

_MAX_WRITERS = 10_000  # whose last numbers one reader of a stream remembers
Entries = list[tuple[bytes, Fields]]

_RETENTION_MS = 3600_000  # stream entries are hints; an hour of them is for people
_MOST_HINTS = 4096  # that stay where Redis's time cannot tell which are old
_AT_ONCE = 16  # entries that one command reads: each may be large
_BEGINNING = b"0-0"  # the place before every entry of a stream
_LARGEST = 1 << 64


class Streams:
    """The streams of one cluster.

    Attributes:
        connection: connection to the cluster's Redis.
        dead_letters: unreadable entries.
    """

    def __init__(self, connection: RedisConnection, dead_letters: DeadLetters) -> None:
        self.connection, self.dead_letters = connection, dead_letters
        self._newest_ms: dict[str, int] = {}  # by stream, by Redis's clock

    async def append(
        self, stream: str, message: msgspec.Struct, *, max_entries: int | None = None
    ) -> None:
        """Add an entry to a stream and trim the stream.

        A value that takes no entries is replaced by a stream.

        Args:
            stream: name of the stream.
            message: message of the entry.
            max_entries: number of entries to keep, about; None keeps those of the last hour.

        Raises:
            PeerLost: Redis did not do it within a second; it may have been done.
        """
        newest_ms = self._newest_ms.get(stream, 0)
        if max_entries is None and newest_ms > time.time() * 1000 + AHEAD_MS:
            # Somebody chose the last id, and no later one is larger.
            max_entries = _MOST_HINTS
        key, by_age = self.connection.key(stream), max_entries is None and newest_ms > 0
        fields = {
            "t": str(type(message).__struct_config__.tag),
            "p": self.connection.seals.seal(stream, msgspec.msgpack.encode(message)),
        }
        with self.connection.noting_outages():
            try:
                entry_id = await self.connection.client.xadd(
                    key,
                    fields,
                    minid=max(0, newest_ms - _RETENTION_MS) if by_age else None,
                    maxlen=max_entries,
                    approximate=True,
                )
            except ResponseError as error:
                entry_id = await self.connection.begin_anew(key, fields, error)
        self._newest_ms[stream] = int(entry_id.split(b"-")[0])

    async def refuse_entry(self, stream: str, message: msgspec.Struct, why: str) -> None:
        """Put aside a message that was read, and that its reader cannot use."""
        await self.dead_letters.message(stream, msgspec.msgpack.encode(message), Unreadable(why))

    async def watch(self, stream: str, decoder: Decoder[T]) -> AsyncIterator[T | None]:
        """Give every entry from now on; the iterator never ends.

        It gives ``None`` when the reader should look at the documents. This is so at the start, after two
        seconds without news, for an unreadable entry, and each time Redis was lost or came back.
        """
        entry_reader = self._entry_reader(stream, decoder, repeats=True)
        last_id: bytes | None = None
        idle, backoff = False, Backoff()
        while True:
            entries: Entries = []
            try:
                with self.connection.noting_outages():
                    if last_id is None or (idle and await self._begins_anew(stream, last_id)):
                        last_id = await self._newest_id(stream)
                    else:
                        entries = await self._after(stream, last_id)
                backoff.reset()
            except PeerLost as error:
                log.debug("redis.lost", cause=error.cause)
                # A Redis that lost its data counts its own ids.
                last_id = None
                await backoff.pause()
            idle = not entries
            for entry_id, fields in entries:
                last_id = entry_id
                yield await entry_reader.read(entry_id, fields)
            if idle:
                yield None

    async def read_on(self, stream: str, decoder: Decoder[T]) -> AsyncGenerator[T | None, None]:
        """Give every existing entry, oldest first, and every later one; the iterator never ends.

        It gives ``None`` after two seconds without news, and when Redis was lost. Each entry is
        given once, even if another process appends its copy. A Redis that lost its data is read
        from its beginning.
        """
        entry_reader = self._entry_reader(stream, decoder, repeats=False)
        last_id, idle, backoff = _BEGINNING, False, Backoff()
        while True:
            entries: Entries = []
            try:
                with self.connection.noting_outages():
                    if idle and await self._begins_anew(stream, last_id):
                        last_id = _BEGINNING
                    entries = await self._after(stream, last_id)
                backoff.reset()
            except PeerLost as error:
                log.debug("redis.lost", cause=error.cause)
                await backoff.pause()
            idle = not entries
            for entry_id, fields in entries:
                last_id = entry_id
                message = await entry_reader.read(entry_id, fields)
                if message is not None:
                    yield message
            if idle:
                yield None

    async def latest(self, stream: str, decoder: Decoder[T], count: int) -> list[T]:
        """Read the last entries of a stream.

        Returns:
            At most ``count`` messages that can be read, oldest first.

        Raises:
            PeerLost: Redis did not answer within a second.
        """
        entry_reader = _EntryReader(
            self.connection, self.dead_letters, stream, decoder, repeats=True, looks_back=True
        )
        found = list[T]()
        newest: Any = "+"
        for left in range(count, 0, -_AT_ONCE):
            try:
                with self.connection.noting_outages():
                    entries = await self.connection.client.xrevrange(
                        self.connection.key(stream), max=newest, count=min(left, _AT_ONCE)
                    )
            except CommandRefused:  # it is no stream
                break
            read = [await entry_reader.read(*entry) for entry in entries]
            found += [message for message in read if message is not None]
            if len(entries) < min(left, _AT_ONCE) or (newest := _before(entries[-1][0])) is None:
                break
        return found[::-1]

    def _entry_reader(
        self, stream: str, decoder: Decoder[T], *, repeats: bool
    ) -> "_EntryReader[T]":
        return _EntryReader(self.connection, self.dead_letters, stream, decoder, repeats=repeats)

    async def _begins_anew(self, stream: str, last_id: bytes) -> bool:
        """True if the stream ends before ``last_id``: Redis lost its data, or the stream was replaced."""
        return _place(await self._newest_id(stream)) < _place(last_id)

    async def _newest_id(self, stream: str) -> bytes:
        newest = await self.connection.client.xrevrange(self.connection.key(stream), count=1)
        return newest[0][0] if newest else _BEGINNING

    async def _after(self, stream: str, last_id: bytes) -> Entries:
        answer = await self.connection.reader.xread(
            {self.connection.key(stream): last_id}, count=_AT_ONCE, block=int(BLOCK_S * 1000)
        )
        return answer[0][1] if answer else []


def _place(entry_id: bytes) -> tuple[int, ...]:
    """Split an entry's id into Redis's time and a number, which order the entries of a stream."""
    return tuple(int(part) for part in entry_id.split(b"-"))


def _before(entry_id: bytes) -> str | None:
    """Return the largest id that is smaller; None if there is none."""
    time_ms, number = _place(entry_id)
    if number:
        return f"{time_ms}-{number - 1}"
    return f"{time_ms - 1}-{_LARGEST - 1}" if time_ms else None


class _EntryReader(Generic[T]):
    """Reads messages from the entries of one stream.

    Args:
        connection: connection to the cluster's Redis.
        dead_letters: takes entries that cannot be read.
        stream: name of the stream.
        decoder: decoder of the messages.
        repeats: accept an entry that a writer has appended before; False gives each once only.
        looks_back: the reader may meet entries that it has read before.
    """

    def __init__(
        self,
        connection: RedisConnection,
        dead_letters: DeadLetters,
        stream: str,
        decoder: Decoder[T],
        *,
        repeats: bool,
        looks_back: bool = False,
    ) -> None:
        self._connection, self._dead_letters = connection, dead_letters
        self._stream, self._decoder = stream, decoder
        self._repeats, self._looks_back = repeats, looks_back
        self._newest: dict[bytes, int] = {}  # number, by writer

    async def read(self, entry_id: bytes, fields: Fields) -> T | None:
        """Read one entry; one that cannot be read goes to the dead letters.

        Returns:
            The message; None if it cannot be read, is of another version, or is a repeat.
        """
        value = fields.get(b"p", b"")
        try:
            message, opened = read_message(
                self._connection.seals, self._stream, value, self._decoder
            )
        except Unreadable as why:
            tag = fields.get(b"t", b"").decode(errors="replace")[:100]
            # A newer peer's, of whom the documents tell the rest.
            if why.opened is not None and _another_version(tag, self._decoder):
                log.warning("entry.version_unknown", stream=self._stream, type=tag)
            else:
                is_new = not self._looks_back
                await self._dead_letters.entry(self._stream, entry_id, value, why, is_new=is_new)
            return None
        return message if self._repeats or self._is_new(opened) else None

    def _is_new(self, opened: Opened) -> bool:
        """Compare with the newest entry of its writer that was read; remember this one."""
        if opened.number <= self._newest.get(opened.writer, -1):
            REFUSED.labels("repeated").inc()
            return False
        # Who wrote last stands last.
        self._newest.pop(opened.writer, None)
        self._newest[opened.writer] = opened.number
        if len(self._newest) > _MAX_WRITERS:
            del self._newest[next(iter(self._newest))]
        return True


def _another_version(tag: str, decoder: Decoder[Any]) -> bool:
    known = getattr(getattr(decoder.type, "__struct_config__", None), "tag", None)
    return isinstance(known, str) and tag != known and _kind(tag) == _kind(known)


def _kind(tag: str) -> str:
    return tag.rpartition(".v")[0]
