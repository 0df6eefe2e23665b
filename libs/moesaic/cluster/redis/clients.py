"""Clients of Redis, and the meaning of their failures."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
from moesaic.errors import InvalidInput, MoesaicError, NotReady, PeerLost

COMMAND_TIMEOUT_S = 1.0
BLOCK_S = 2.0  # how long a read waits for news

CONTROL_PLANE_UP = Gauge(
    "moesaic_control_plane_up", "1 while Redis answers; without it the last placement holds"
)
# Answers of Redis about one key: it holds a value of another type, or a stream that ends with the largest id there is.
_OF_A_KEY = ("WRONGTYPE", "stream has exhausted", "equal or smaller than")
_FLAG = "--redis-url (MOESAIC_REDIS_URL)"
_SCHEMES = ("redis://", "rediss://", "unix://")


class CommandRefused(PeerLost):
    """Redis answers, and does not do what was asked of one key: that is no outage."""


def redis_client(redis_url: str, name: str, *, timeout_s: float) -> Any:
    """Make a client that connects when first used and never repeats a command by itself.

    A command whose answer is lost may have been done, and only its sender knows if it may be repeated.

    Raises:
        InvalidInput: the URL cannot be one of Redis.
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
    """Raise a cancellation of the task that what is called within has lost.

    Before Python 3.12 asyncio.wait_for, with which redis-py sends, loses a cancellation that comes
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
    """True for answers of Redis that only one key is the cause of."""
    return isinstance(error, ResponseError) and any(words in str(error) for words in _OF_A_KEY)


def _diagnosis(where: str, error: BaseException) -> MoesaicError:
    while isinstance(error.__cause__, RedisError):  # on a Unix socket redis-py wraps the cause
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
