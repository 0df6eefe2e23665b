"""Entries of streams: read as messages, and put aside where that fails."""

from typing import Any, Generic, TypeVar

import structlog

from moesaic.cluster.redis.connection import RedisConnection
from moesaic.cluster.redis.dead_letters import DeadLetters
from moesaic.cluster.redis.reading import Decoder, Unreadable, read_message
from moesaic.cluster.redis.seals import REFUSED, Opened

log = structlog.get_logger()
T = TypeVar("T")
Fields = dict[bytes, bytes]
"""Fields of an entry: ``t`` is the tag of the message's type, ``p`` the sealed message."""

_MAX_WRITERS = 10_000  # whose last numbers one reader of a stream remembers


class EntryReader(Generic[T]):
    """Reads messages from the entries of one stream.

    Args:
        connection: to the cluster's Redis.
        dead_letters: for entries that cannot be read.
        stream: its name.
        decoder: of the messages.
        repeats: accept an entry that a writer has appended before; False gives each once only.
        looks_back: at entries that were read before, perhaps.
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
        self._newest.pop(opened.writer, None)  # who wrote last stands last
        self._newest[opened.writer] = opened.number
        if len(self._newest) > _MAX_WRITERS:
            del self._newest[next(iter(self._newest))]
        return True


def _another_version(tag: str, decoder: Decoder[Any]) -> bool:
    known = getattr(getattr(decoder.type, "__struct_config__", None), "tag", None)
    return isinstance(known, str) and tag != known and _kind(tag) == _kind(known)


def _kind(tag: str) -> str:
    return tag.rpartition(".v")[0]
