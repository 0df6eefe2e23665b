"""Connections to Redis: clients, the meaning of their failures, names of keys, seals, and the note of outages."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from prometheus_client import Gauge
from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from moesaic.addresses import public_url
from moesaic.cluster.redis.seals import Seals
from moesaic.cluster.security.credentials import Credentials
from moesaic.cluster.waiting import Backoff
from moesaic.errors import InvalidInput, MoesaicError, NotReady, PeerLost

log = structlog.get_logger()

AHEAD_MS = 86_400_000  # that Redis's clock may be before ours
COMMAND_TIMEOUT_S = 1.0
BLOCK_S = 2.0  # how long a read waits for news

CONTROL_PLANE_UP = Gauge(
    "moesaic_control_plane_up",
    "1 while Redis answers, else 0; without Redis the last placement stays",
)
# Answers of Redis about one key: it holds a value of another type, or a stream that ends with the largest id there is.
_OF_A_KEY = ("WRONGTYPE", "stream has exhausted", "equal or smaller than")
_FLAG = "--redis-url (MOESAIC_REDIS_URL)"
_SCHEMES = ("redis://", "rediss://", "unix://")


class CommandRefused(PeerLost):
    """An error of Redis about one key; Redis itself is up."""


class RedisConnection:
    """Clients of one Redis for one cluster; both connect when first used.

    Attributes:
        client: client for commands that answer at once.
        reader: client for reads that wait for news.
        seals: the cluster's seals.
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
        """Replace a value that takes no entry by a stream with one, if this process may; else raise
        ``error``.

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
        InvalidInput: the URL is wrong, and waiting cannot help.
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


def redis_client(redis_url: str, name: str, *, timeout_s: float) -> Any:
    """Make a client that connects when first used and never retries a command by itself.

    A command whose answer is lost may have been done; only its sender knows if a retry is safe.

    Raises:
        InvalidInput: the URL is not one of Redis.
    """
    if not redis_url.startswith(_SCHEMES):
        raise InvalidInput(
            "redis_url",
            f"{_FLAG} must begin with one of {', '.join(_SCHEMES)}, got {public_url(redis_url)!r}",
        )
    try:
        return redis.Redis.from_url(
            redis_url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            socket_timeout=timeout_s,
            health_check_interval=10,
            client_name=name,
        )
    except (ValueError, TypeError) as error:  # a bad port or database number
        raise InvalidInput("redis_url", f"{_FLAG} {public_url(redis_url)}: {error}") from error


async def check_redis(redis_url: str) -> None:
    """Check that a usable Redis answers.

    Raises:
        InvalidInput: the URL has a wrong form or credentials, or another server answers there.
        NotReady: nothing answers now.
    """
    client = redis_client(redis_url, "moesaic-check", timeout_s=COMMAND_TIMEOUT_S)
    where = f"{_FLAG} {public_url(redis_url)}"
    try:
        with no_cancellation_lost():
            async with asyncio.timeout(2 * COMMAND_TIMEOUT_S):
                await client.ping()
    except (RedisError, OSError) as error:
        raise _diagnosis(where, error) from error
    finally:
        await client.aclose()


@contextmanager
def no_cancellation_lost() -> Iterator[None]:
    """Raise a cancellation of the task that the awaited call has lost.

    Before Python 3.12 ``asyncio.wait_for``, with which redis-py sends, loses a cancellation that comes
    just as it ends. The task's own count shows it.
    """
    task = asyncio.current_task()
    asked_before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > asked_before:
            raise asyncio.CancelledError


@contextmanager
def outages(redis_url: str) -> Iterator[None]:
    """Turn Redis's failures into ``PeerLost`` and keep ``moesaic_control_plane_up`` true."""
    try:
        with no_cancellation_lost():
            yield
    except (RedisError, OSError) as error:
        if is_of_a_key(error):
            CONTROL_PLANE_UP.set(1)
            raise CommandRefused(f"redis at {public_url(redis_url)}", _cause(error)) from error
        CONTROL_PLANE_UP.set(0)
        raise PeerLost(f"redis at {public_url(redis_url)}", _cause(error)) from error
    else:
        CONTROL_PLANE_UP.set(1)


def is_of_a_key(error: object) -> bool:
    """True for errors of Redis about one key alone."""
    return isinstance(error, ResponseError) and any(words in str(error) for words in _OF_A_KEY)


def _diagnosis(where: str, error: BaseException) -> MoesaicError:
    # On a Unix socket redis-py wraps the cause.
    while isinstance(error.__cause__, RedisError):
        error = error.__cause__
    if isinstance(error, BusyLoadingError):
        return NotReady(f"{where}: still loading its data")
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return InvalidInput("redis_url", f"{where}: refuses these credentials: {error}")
    if isinstance(error, InvalidResponse):
        return InvalidInput("redis_url", f"{where}: what answers there is not Redis")
    if isinstance(error, ResponseError):
        return InvalidInput("redis_url", f"{where}: {error}")
    return NotReady(f"{where}: {_cause(error)}")


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError) or "imeout" in type(error).__name__:
        return "no answer in time"
    return str(error)[:200] or type(error).__name__
