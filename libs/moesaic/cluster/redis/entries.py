"""Entries of streams: opened, decoded, and put aside where that fails."""

from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from prometheus_client import Counter
from redis.exceptions import RedisError

from moesaic.cluster.redis.connection import RedisConnection
from moesaic.cluster.redis.seals import REFUSED, Opened, SealBroken

log = structlog.get_logger()
T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder
Fields = dict[bytes, bytes]
"""Fields of an entry: ``t`` is the tag of the message's type, ``p`` the sealed message."""

_MAX_DEAD_LETTERS = 1000
_MAX_DEAD_LETTER_BYTES = 4096
_MAX_WRITERS = 10_000  # whose last numbers one reader of a stream remembers

_dead_letters = Counter(
    "moesaic_stream_dead_letters", "stream entries that could not be read", ["stream"]
)


class EntryReader(Generic[T]):
    """Reads messages from the entries of one stream.

    Args:
        connection: to the cluster's Redis.
        stream: its name.
        decoder: of the messages.
        repeats: accept an entry that a writer has appended before; False gives each once only.
    """

    def __init__(
        self, connection: RedisConnection, stream: str, decoder: Decoder[T], *, repeats: bool
    ) -> None:
        self._connection, self._stream, self._decoder = connection, stream, decoder
        self._repeats = repeats
        self._newest: dict[bytes, int] = {}  # number, by writer

    async def read(self, entry_id: bytes, fields: Fields) -> T | None:
        """Open and decode one entry; a damaged or forged one goes to ``dlq:<stream>``.

        Returns:
            The message; None if it cannot be read, is of another version, or is a repeat.
        """
        value = fields.get(b"p", b"")
        try:
            opened = self._connection.seals.open(self._stream, value)
        except SealBroken as error:
            REFUSED.labels("entry").inc()
            await self._put_aside(entry_id, value, str(error))
            return None
        if not (self._repeats or self._is_new(opened)):
            return None
        try:
            return self._decoder.decode(opened.message)
        except msgspec.DecodeError as error:
            tag = fields.get(b"t", b"").decode(errors="replace")
            if _another_version(tag, self._decoder):  # a newer peer's; the documents tell the rest
                log.warning("entry.version_unknown", stream=self._stream, type=tag)
                return None
            await self._put_aside(entry_id, opened.message, str(error))
            return None

    def _is_new(self, opened: Opened) -> bool:
        """Compare with the newest entry of its writer that was read; remember this one."""
        if opened.number <= self._newest.get(opened.writer, -1):
            REFUSED.labels("repeated").inc()
            return False
        self._newest.pop(opened.writer, None)  # who wrote last stands last
        self._newest[opened.writer] = opened.number
        if len(self._newest) > _MAX_WRITERS:
            del self._newest[next(iter(self._newest))]
        return True

    async def _put_aside(self, entry_id: bytes, payload: bytes, why: str) -> None:
        _dead_letters.labels(self._stream).inc()
        log.error("entry.refused", stream=self._stream, entry_id=entry_id.decode(), cause=why)
        # All readers of the stream meet this entry. Under its own id Redis keeps only the first.
        with suppress(RedisError, OSError):
            await self._connection.client.xadd(
                self._connection.key(f"dlq:{self._stream}"),
                {"p": payload[:_MAX_DEAD_LETTER_BYTES], "why": why[:200]},
                id=entry_id,
                maxlen=_MAX_DEAD_LETTERS,
                approximate=True,
            )


def _another_version(tag: str, decoder: Decoder[Any]) -> bool:
    known = getattr(getattr(decoder.type, "__struct_config__", None), "tag", None)
    return isinstance(known, str) and tag != known and _kind(tag) == _kind(known)


def _kind(tag: str) -> str:
    return tag.rpartition(".v")[0]
