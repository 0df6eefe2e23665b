"""Documents in Redis: sealed values, sets of names, and compare-and-set."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
import structlog
from redis.exceptions import WatchError

from moesaic.cluster.redis.connection import RedisConnection
from moesaic.cluster.redis.seals import REFUSED, SealBroken

log = structlog.get_logger()
T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder


class Documents:
    """The documents of one cluster.

    Every call to Redis raises ``PeerLost`` when it was not done within a second.

    Attributes:
        connection: to the cluster's Redis.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection

    async def put(self, name: str, message: msgspec.Struct, *, ttl_s: int | None = None) -> None:
        """Store a document, for good or for ``ttl_s`` seconds."""
        with self.connection.noting_outages():
            await self.connection.client.set(
                self.connection.key(name), self.sealed(name, message), ex=ttl_s
            )

    async def get(self, name: str, decoder: Decoder[T]) -> T | None:
        """Read a document.

        Returns:
            The document; None if it is not there or cannot be read, which is logged.
        """
        return self.opened(name, await self.get_bytes(name), decoder)

    async def get_written(
        self, names: Iterable[str], decoder: Decoder[T]
    ) -> list[tuple[T, int] | None]:
        """Read several documents at once, each with its number.

        Returns:
            In the order of ``names`` what ``get`` gives, with the number of the writing: it grows
            with all that one process writes, and is in milliseconds since 1970 by its clock.
        """
        names = list(names)
        if not names:
            return []
        with self.connection.noting_outages():
            values = await self.connection.client.mget(
                [self.connection.key(name) for name in names]
            )
        return [
            self._opened(name, value, decoder) for name, value in zip(names, values, strict=True)
        ]

    def sealed(self, name: str, message: msgspec.Struct) -> bytes:
        """Seal a document as it is stored under ``name``."""
        return self.connection.seals.seal(name, msgspec.msgpack.encode(message))

    def opened(self, name: str, value: bytes | None, decoder: Decoder[T]) -> T | None:
        """Open a value that is stored under ``name``.

        Returns:
            The document; None, which is logged, if it cannot be read or no process of this
            cluster wrote it there.
        """
        found = self._opened(name, value, decoder)
        return found[0] if found else None

    def age_s(self, number: int) -> float:
        """Give the age of a writing with this number, by the writer's clock and ours."""
        return self.connection.seals.age_s(number)

    def _opened(self, name: str, value: bytes | None, decoder: Decoder[T]) -> tuple[T, int] | None:
        if value is None:
            return None
        try:
            opened = self.connection.seals.open(name, value)
            return decoder.decode(opened.message), opened.number
        except SealBroken as error:
            REFUSED.labels("document").inc()
            log.error("document.refused", name=name, cause=str(error))
        except msgspec.DecodeError as error:
            log.error("document.refused", name=name, cause=str(error))
        return None

    async def get_bytes(self, name: str) -> bytes | None:
        """Read a value as ``compare_and_set`` writes it, sealed or not."""
        with self.connection.noting_outages():
            value: bytes | None = await self.connection.client.get(self.connection.key(name))
        return value

    async def delete(self, name: str) -> None:
        """Remove a key; nothing happens if it is not there."""
        with self.connection.noting_outages():
            await self.connection.client.delete(self.connection.key(name))

    async def add_member(self, name: str, member: str) -> None:
        """Put a member into a set."""
        with self.connection.noting_outages():
            await self.connection.client.sadd(self.connection.key(name), member)

    async def remove_member(self, name: str, member: str) -> None:
        """Take a member out of a set."""
        with self.connection.noting_outages():
            await self.connection.client.srem(self.connection.key(name), member)

    async def members(self, name: str) -> list[str]:
        """List the members of a set, sorted."""
        with self.connection.noting_outages():
            found = await self.connection.client.smembers(self.connection.key(name))
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
            True if they were set. If not, nothing was.
        """
        watched = [self.connection.key(name) for name in expected]
        with self.connection.noting_outages():
            async with self.connection.client.pipeline(transaction=True) as transaction:
                await transaction.watch(*watched)
                if await transaction.mget(watched) != list(expected.values()):
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
