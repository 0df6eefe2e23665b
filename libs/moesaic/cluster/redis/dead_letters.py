"""Dead letters: unreadable values, kept for people under ``dlq:<stream>`` and ``dlq:documents``."""

import hashlib
import time
from typing import Any

import structlog
from prometheus_client import Counter
from redis.exceptions import RedisError, ResponseError

from moesaic.cluster.redis.connection import (
    AHEAD_MS,
    RedisConnection,
    is_of_a_key,
    no_cancellation_lost,
)
from moesaic.cluster.redis.reading import Unreadable
from moesaic.cluster.redis.seals import REFUSED

log = structlog.get_logger()

DOCUMENTS = "documents"  # the dead letters of all keys that are no streams
_MAX_LETTERS = 1000
_MAX_BYTES = 4096  # of a letter
_MAX_WHY = 200
_MAX_TOLD = 1024  # documents, and entries, that are remembered
# Answer of Redis to an id that is not behind the last one of a stream.
_ID_REFUSED = "equal or smaller than"

_letters = Counter(
    "moesaic_stream_dead_letters",
    "Stream entries and documents that could not be read",
    ["stream"],
)


class DeadLetters:
    """Writer of dead letters; reports a document once, however often it is read."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._told: dict[str, bytes] = {}  # digest of the value, by document
        self._told_entries: dict[tuple[str, bytes], None] = {}

    def document_is_readable(self, name: str) -> None:
        """Report a document again if it becomes unreadable again."""
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
        payload = value if why.opened is None else why.opened.message
        await self._put(stream, {}, payload, why, entry_id)

    async def message(self, stream: str, message: bytes, why: Unreadable) -> None:
        """Put aside a message of a stream that was read, and that its reader cannot use."""
        await self._put(stream, {}, message, why)

    async def _put(
        self,
        box: str,
        fields: dict[str, str],
        value: bytes,
        why: Unreadable,
        entry_id: bytes | None = None,
    ) -> None:
        _letters.labels(box).inc()
        letter = {"p": value[:_MAX_BYTES], "why": str(why)[:_MAX_WHY], **fields}
        try:
            with no_cancellation_lost():
                await self._keep(self._connection.key(f"dlq:{box}"), letter, entry_id)
        except (RedisError, OSError) as error:
            log.warning("letter.lost", stream=box, cause=str(error)[:_MAX_WHY])

    async def _keep(self, key: str, letter: dict[str, Any], entry_id: bytes | None) -> None:
        """Append a letter; a value that takes no letters is replaced by a stream."""
        if entry_id is not None:
            # Somebody chose an id that is far ahead. Later letters would have no place behind it.
            if not _is_ahead(entry_id) and await self._is_kept_once(key, letter, entry_id):
                return
            letter = {**letter, "id": entry_id}
        try:
            await self._append(key, letter)
        except ResponseError as error:
            await self._connection.begin_anew(key, letter, error)

    async def _is_kept_once(self, key: str, letter: dict[str, Any], entry_id: bytes) -> bool:
        """Keep a letter under the id of its entry, which is the same for all readers of the stream.

        Returns:
            False if there is no room for it, and no other reader has kept it.
        """
        try:
            await self._append(key, letter, entry_id)
        except ResponseError as error:
            if not is_of_a_key(error):
                raise
            if _ID_REFUSED not in str(error):
                return False
            return bool(await self._connection.client.xrange(key, entry_id, entry_id, count=1))
        return True

    async def _append(self, key: str, letter: dict[str, Any], entry_id: bytes = b"*") -> None:
        await self._connection.client.xadd(
            key, letter, id=entry_id, maxlen=_MAX_LETTERS, approximate=True
        )


def _is_ahead(entry_id: bytes) -> bool:
    return int(entry_id.split(b"-")[0]) > time.time() * 1000 + AHEAD_MS
