"""Control metadata over Redis: documents, leases, compare-and-set, and streams that hint at news.

State lives in documents; a stream entry only says that one changed. So lost entries cost nothing
but a look at the documents. Both are sealed with the cluster's secret
(``moesaic.cluster.redis.seals``). Unreadable values count as absent
(``moesaic.cluster.redis.reading``), and are kept as dead letters.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moesaic.cluster.redis.connection import CONTROL_PLANE_UP, RedisConnection, await_redis
from moesaic.cluster.redis.dead_letters import DeadLetters
from moesaic.cluster.redis.documents import Documents
from moesaic.cluster.redis.streams import Streams
from moesaic.cluster.security.credentials import Credentials, own_credentials


class Bus(Documents, Streams):
    """One cluster's keys on one Redis; every name is prefixed ``moesaic:{cluster}:``.

    Every call but ``watch`` and ``read_on`` raises ``PeerLost`` if Redis does not do it within a
    second. Then a write may or may not have been done. Nothing is retried automatically.
    """

    def __init__(self, redis_url: str, cluster: str, credentials: Credentials) -> None:
        connection = RedisConnection(redis_url, cluster, credentials)
        dead_letters = DeadLetters(connection)
        Documents.__init__(self, connection, dead_letters)
        Streams.__init__(self, connection, dead_letters)

    @property
    def last_lost(self) -> float:
        """Monotonic time at which Redis last failed; -inf if it never did."""
        return self.connection.last_lost

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        redis_url: str,
        cluster: str,
        waiting_for: list[str] | None = None,
        credentials: Credentials | None = None,
    ) -> AsyncIterator["Bus"]:
        """Open a bus on a Redis that answers; wait and log while it does not.

        Args:
            redis_url: ``redis://``, ``rediss://`` or ``unix://``.
            cluster: keeps clusters on one Redis apart.
            waiting_for: a list for people, such as ``ServiceStatus.waiting_for``; it names Redis
                during the wait.
            credentials: those of another cluster, if not this process's own.

        Raises:
            InvalidInput: the URL is wrong, and waiting cannot help.
        """
        await await_redis(redis_url, [] if waiting_for is None else waiting_for)
        bus = cls(redis_url, cluster, credentials or own_credentials())
        CONTROL_PLANE_UP.set(1)
        try:
            yield bus
        finally:
            await bus.connection.close()
