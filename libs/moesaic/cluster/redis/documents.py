"""Documents in Redis: sealed values, numbers, sets of names, and compare-and-set."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from redis.exceptions import ResponseError, WatchError

from moesaic.cluster.redis.connection import CommandRefused, RedisConnection, is_of_a_key
from moesaic.cluster.redis.dead_letters import DeadLetters
from moesaic.cluster.redis.reading import (
    MAX_BYTES,
    Decoder,
    Unreadable,
    read_message,
    read_number,
)

T = TypeVar("T")

_AT_ONCE = 64  # values that one command reads
_MAX_MEMBERS = 20_000  # of a set that are looked at
_MAX_MEMBER_BYTES = 256
_NO_STRING = Unreadable("its key holds no string", foreign=True)


class KeyContent(NamedTuple, Generic[T]):
    """Content of a key.

    Attributes:
        value: for ``compare_and_set``; None: no string that can be read.
        message: None if it counts as absent.
    """

    value: bytes | None
    message: T | None


class Documents:
    """The documents of one cluster.

    Every call to Redis raises ``PeerLost`` if it was not done within a second. Unreadable values
    count as absent (``moesaic.cluster.redis.reading``) and go to the dead letters.

    Attributes:
        connection: connection to the cluster's Redis.
        dead_letters: unreadable values.
    """

    def __init__(self, connection: RedisConnection, dead_letters: DeadLetters) -> None:
        self.connection, self.dead_letters = connection, dead_letters

    async def put(self, name: str, message: msgspec.Struct, *, ttl_s: int | None = None) -> None:
        """Store a document, for good or for ``ttl_s`` seconds."""
        with self.connection.noting_outages():
            await self.connection.client.set(
                self.connection.key(name), self.sealed(name, message), ex=ttl_s
            )

    async def get(self, name: str, decoder: Decoder[T]) -> T | None:
        """Read a document.

        Returns:
            The document; None if it counts as absent.
        """
        return (await self.get_content(name, decoder)).message

    async def get_content(self, name: str, decoder: Decoder[T]) -> "KeyContent[T]":
        """Read a document that is to be replaced."""
        value = await self.get_bytes(name)
        found = await self._read(name, value, decoder)
        return KeyContent(value, found[0] if found else None)

    async def get_number(self, name: str) -> KeyContent[int]:
        """Read a number that is written in digits."""
        value = await self.get_bytes(name)
        if value is None:
            return KeyContent(None, None)
        try:
            return KeyContent(value, read_number(value))
        except Unreadable as why:
            await self.dead_letters.document(name, value, why)
            return KeyContent(value, None)

    async def get_written(
        self, names: Iterable[str], decoder: Decoder[T]
    ) -> list[tuple[T, int] | None]:
        """Read several documents, each with its number.

        Returns:
            A result of ``get`` for each of ``names``, in order, with the number of the write. Numbers
            of one process grow with each write; they are milliseconds since 1970 by its clock.
        """
        names, found = list(names), list[tuple[T, int] | None]()
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            with self.connection.noting_outages():
                values = await self._values(some, self.connection.client)
            for name, value in zip(some, values, strict=True):
                found.append(await self._read(name, value, decoder))
        return found

    def sealed(self, name: str, message: msgspec.Struct) -> bytes:
        """Seal a document as it is stored under ``name``."""
        return self.connection.seals.seal(name, msgspec.msgpack.encode(message))

    def age_s(self, number: int) -> float:
        """Return the age of a write with this number, by the writer's clock and ours."""
        return self.connection.seals.age_s(number)

    async def get_bytes(self, name: str) -> bytes | None:
        """Read a value as ``compare_and_set`` writes it, sealed or not."""
        with self.connection.noting_outages():
            [value] = await self._values([name], self.connection.client)
        return value

    async def expires_within(self, name: str, seconds: float) -> bool:
        """True if a key is absent or expires within so many seconds."""
        with self.connection.noting_outages():
            left_ms = await self.connection.client.pttl(self.connection.key(name))
        return bool(left_ms != -1 and left_ms <= seconds * 1000)

    async def delete(self, name: str) -> None:
        """Remove a key; nothing happens if it is not there."""
        with self.connection.noting_outages():
            await self.connection.client.delete(self.connection.key(name))

    async def add_member(self, name: str, member: str) -> None:
        """Put a member into a set; a value that is no set is replaced by one."""
        key = self.connection.key(name)
        with self.connection.noting_outages():
            try:
                await self.connection.client.sadd(key, member)
            except ResponseError as error:
                if not is_of_a_key(error):
                    raise
                async with self.connection.client.pipeline(transaction=True) as together:
                    together.delete(key)
                    together.sadd(key, member)
                    await together.execute()

    async def remove_member(self, name: str, *members: str) -> None:
        """Take members out of a set."""
        for first in range(0, len(members), _AT_ONCE):
            with self.connection.noting_outages():
                await self.connection.client.srem(
                    self.connection.key(name), *members[first : first + _AT_ONCE]
                )

    async def members(self, name: str) -> list[str]:
        """List the members of a set, sorted; of a very large one only some."""
        found, unreadable = set[str](), list[bytes]()
        try:
            with self.connection.noting_outages():
                scanned = self.connection.client.sscan_iter(self.connection.key(name), count=1000)
                async for member in scanned:
                    if len(member) > _MAX_MEMBER_BYTES or not _is_text(member):
                        unreadable.append(member[:_MAX_MEMBER_BYTES])
                    elif len(found) < _MAX_MEMBERS:
                        found.add(member.decode())
                    else:
                        break
        except CommandRefused as error:
            await self.dead_letters.document(name, b"", Unreadable(error.cause, foreign=True))
        if unreadable:
            why = Unreadable(f"{len(unreadable)} of its members are no names", foreign=True)
            await self.dead_letters.document(name, b" ".join(sorted(unreadable)), why)
        return sorted(found)

    async def refuse(self, name: str, value: bytes, why: str) -> None:
        """Put aside a value that was read, and that its reader cannot use."""
        await self.dead_letters.document(name, value, Unreadable(why, foreign=True))

    async def compare_and_set(
        self,
        expected: Mapping[str, bytes | None],
        values: Mapping[str, bytes | None],
        *,
        ttl_s: int | None = None,
    ) -> bool:
        """Set ``values`` together if all of ``expected`` still hold; ``None`` is an absent key.

        Returns:
            True if they were set. If not, nothing was.
        """
        watched = [self.connection.key(name) for name in expected]
        with self.connection.noting_outages():
            async with self.connection.client.pipeline(transaction=True) as transaction:
                await transaction.watch(*watched)
                if await self._values(list(expected), transaction) != list(expected.values()):
                    return False
                transaction.multi()
                for name, value in values.items():
                    if value is None:
                        transaction.delete(self.connection.key(name))
                    else:
                        transaction.set(self.connection.key(name), value, ex=ttl_s)
                try:
                    await transaction.execute()
                except WatchError:
                    return False
        return True

    async def _values(self, names: Sequence[str], client: Any) -> list[bytes | None]:
        """Read values with ``client``; those that are no strings, or too large, count as absent."""
        keys = [self.connection.key(name) for name in names]
        async with self.connection.client.pipeline(transaction=False) as asked:
            for key in keys:
                asked.strlen(key)
            sizes = await asked.execute(raise_on_error=False)
        fit = []
        for name, key, size in zip(names, keys, sizes, strict=True):
            if is_of_a_key(size):
                await self.dead_letters.document(name, b"", _NO_STRING)
            elif isinstance(size, Exception):
                raise size
            elif size > MAX_BYTES:
                why = Unreadable(f"it has {size} bytes, {MAX_BYTES} at most can be read")
                await self.dead_letters.document(name, b"", why)
            else:
                fit.append(key)
        found = [await client.get(fit[0])] if len(fit) == 1 else []
        if len(fit) > 1:
            found = await client.mget(fit)
        by_key = dict(zip(fit, found, strict=True))
        return [by_key.get(key) for key in keys]

    async def _read(
        self, name: str, value: bytes | None, decoder: Decoder[T]
    ) -> tuple[T, int] | None:
        if value is None:
            return None
        try:
            message, opened = read_message(self.connection.seals, name, value, decoder)
        except Unreadable as why:
            await self.dead_letters.document(name, value, why)
            return None
        self.dead_letters.document_is_readable(name)
        return message, opened.number


def _is_text(member: bytes) -> bool:
    try:
        return member.decode().isprintable()
    except UnicodeDecodeError:
        return False
