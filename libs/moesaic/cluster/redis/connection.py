"""One cluster's connection to its Redis: clients, names of keys, seals, and the note of outages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from redis.exceptions import ResponseError

from moesaic.addresses import public_url
from moesaic.cluster.redis.clients import (
    BLOCK_S,
    COMMAND_TIMEOUT_S,
    CommandRefused,
    check_redis,
    is_of_a_key,
    outages,
    redis_client,
)
from moesaic.cluster.redis.seals import Seals
from moesaic.cluster.security.credentials import Credentials
from moesaic.cluster.waiting import Backoff
from moesaic.errors import NotReady, PeerLost

log = structlog.get_logger()

AHEAD_MS = 86_400_000  # that Redis's clock may be before ours


class RedisConnection:
    """Clients of one Redis for one cluster; both connect when first used.

    Attributes:
        client: for commands that answer at once.
        reader: for reads that wait for news.
        seals: of the cluster.
        last_lost: monotonic time at which Redis last failed; -inf if it never did.
    """

    def __init__(self, redis_url: str, cluster: str, credentials: Credentials) -> None:
        self.seals = Seals(credentials.secret, cluster)
        self._url, self._prefix = redis_url, f"moesaic:{{{cluster}}}:"
        name = f"moesaic-{cluster}"
        self.client = redis_client(redis_url, name, timeout_s=COMMAND_TIMEOUT_S)
        # Its answers may take as long as a read may block, and some more for the way.
        self.reader = redis_client(redis_url, name, timeout_s=BLOCK_S + 2.0)
        self.last_lost = float("-inf")

    def key(self, name: str) -> str:
        """Prefix a name with the cluster's."""
        return self._prefix + name

    @contextmanager
    def noting_outages(self) -> Iterator[None]:
        """Turn Redis's failures into ``PeerLost``, and remember when the last outage was."""
        try:
            with outages(self._url):
                yield
        except CommandRefused:
            raise
        except PeerLost:
            self.last_lost = time.monotonic()
            raise

    async def begin_anew(self, key: str, fields: dict[str, Any], error: ResponseError) -> bytes:
        """Replace by a stream with one entry what takes none, if this process may; else raise ``error``.

        Returns:
            The id of the entry.
        """
        if not is_of_a_key(error):
            raise error
        try:
            async with self.client.pipeline(transaction=True) as together:
                together.delete(key)
                together.xadd(key, fields)
                entry_id: bytes = (await together.execute())[1]
        except ResponseError as refusal:
            raise error from refusal
        return entry_id

    async def close(self) -> None:
        """Close both clients."""
        await self.client.aclose()
        await self.reader.aclose()


async def await_redis(redis_url: str, waiting_for: list[str]) -> None:
    """Wait until a usable Redis answers; ``waiting_for`` names it meanwhile.

    Raises:
        InvalidInput: the URL is wrong in a way that waiting does not cure.
    """
    said, cause, backoff = f"redis at {public_url(redis_url)}", "", Backoff()
    while True:
        try:
            await check_redis(redis_url)
        except NotReady as error:
            if said not in waiting_for:
                waiting_for.append(said)
            if cause != (cause := str(error)):
                log.warning("service.waiting", waiting_for=cause)
            await backoff.pause()
        else:
            if said in waiting_for:
                waiting_for.remove(said)
            return
