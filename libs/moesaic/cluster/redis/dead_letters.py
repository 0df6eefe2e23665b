"""Dead letters: what could not be read, kept for people under ``dlq:<stream>`` and ``dlq:documents``."""

import hashlib
from contextlib import suppress

import structlog
from prometheus_client import Counter
from redis.exceptions import RedisError

from moesaic.cluster.redis.connection import RedisConnection
from moesaic.cluster.redis.reading import Unreadable
from moesaic.cluster.redis.seals import REFUSED

log = structlog.get_logger()

DOCUMENTS = "documents"  # the dead letters of all keys that are no streams
_MAX_LETTERS = 1000
_MAX_BYTES = 4096  # of a letter
_MAX_WHY = 200
_MAX_TOLD = 1024  # documents, and entries, that are remembered

_letters = Counter(
    "moesaic_stream_dead_letters",
    "entries of streams, and documents, that could not be read",
    ["stream"],
)


class DeadLetters:
    """Writer of dead letters; a document that is read again and again is told of once."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._told: dict[str, bytes] = {}  # digest of the value, by document
        self._told_entries: dict[tuple[str, bytes], None] = {}

    def document_is_readable(self, name: str) -> None:
        """Tell of a document again once it cannot be read again."""
        self._told.pop(name, None)

    async def document(self, name: str, value: bytes, why: Unreadable) -> None:
        """Put a document aside that counts as absent."""
        if why.foreign:
            REFUSED.labels("document").inc()
        digest = hashlib.blake2b(value, digest_size=16).digest() + str(why).encode()
        if self._told.pop(name, None) == digest:
            self._told[name] = digest
            return
        self._told[name] = digest
        if len(self._told) > _MAX_TOLD:
            del self._told[next(iter(self._told))]
        log.error("document.refused", name=name, cause=str(why)[:_MAX_WHY])
        await self._put(DOCUMENTS, {"name": name[:_MAX_WHY]}, value, why)

    async def entry(
        self, stream: str, entry_id: bytes, value: bytes, why: Unreadable, *, is_new: bool
    ) -> None:
        """Put an entry of a stream aside; one that ``is_new`` to its reader counts again."""
        was_told = (stream, entry_id) in self._told_entries
        if why.foreign and (is_new or not was_told):
            REFUSED.labels("entry").inc()
        if was_told:
            _letters.labels(stream).inc(is_new)
            return
        self._told_entries[stream, entry_id] = None
        if len(self._told_entries) > _MAX_TOLD:
            del self._told_entries[next(iter(self._told_entries))]
        cause = str(why)[:_MAX_WHY]
        log.error("entry.refused", stream=stream, entry_id=entry_id.decode(), cause=cause)
        # All readers of the stream meet this entry. Under its own id Redis keeps only the first.
        payload = value if why.opened is None else why.opened.message
        await self._put(stream, {}, payload, why, entry_id)

    async def message(self, stream: str, message: bytes, why: Unreadable) -> None:
        """Put a message of a stream aside that was read, and that its reader cannot use."""
        await self._put(stream, {}, message, why)

    async def _put(
        self,
        box: str,
        fields: dict[str, str],
        value: bytes,
        why: Unreadable,
        entry_id: bytes = b"*",
    ) -> None:
        _letters.labels(box).inc()
        with suppress(RedisError, OSError):
            await self._connection.client.xadd(
                self._connection.key(f"dlq:{box}"),
                {"p": value[:_MAX_BYTES], "why": str(why)[:_MAX_WHY], **fields},
                id=entry_id,
                maxlen=_MAX_LETTERS,
                approximate=True,
            )
