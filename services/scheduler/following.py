"""Streams that a scheduler reads while it leads; no entry can stop it from reading the next."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

import msgspec
import structlog

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost

log = structlog.get_logger()
T = TypeVar("T", bound=msgspec.Struct)

LOOK_S = 1.0


async def follow_while_leading(
    bus: Bus,
    leadership: Leadership,
    stream: str,
    decoder: "msgspec.msgpack.Decoder[T]",
    take: Callable[[T], Awaitable[None] | None],
    begin: Callable[[], Awaitable[None] | None] = lambda: None,
    rest: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> None:
    """Give every entry, those already there first, to ``take`` while this scheduler leads; for ever.

    An entry that ``take`` fails on goes to the dead letters.

    Args:
        bus: bus of the cluster.
        leadership: leadership of this scheduler.
        stream: name of the stream.
        decoder: decoder of the messages.
        take: takes in one message.
        begin: called when this scheduler begins to lead, again if it raises ``PeerLost``.
        rest: called after a time without entries.
        end: called when this scheduler no longer leads.
    """
    while True:
        if leadership.held:
            with suppress(PeerLost):
                await _awaited(begin())
                read = bus.read_on(stream, decoder)
                async with aclosing(read) as entries:
                    async for entry in entries:
                        if entry is None:
                            rest()
                        else:
                            await _taken(bus, stream, entry, take)
                            # There may be many at first.
                            await asyncio.sleep(0)
                        if not leadership.held:
                            break
            end()
        await asyncio.sleep(LOOK_S)


async def _taken(
    bus: Bus, stream: str, entry: T, take: Callable[[T], Awaitable[None] | None]
) -> None:
    try:
        await _awaited(take(entry))
    except Exception as error:  # of numbers that others chose
        log.exception("entry.failed", stream=stream)
        await bus.refuse_entry(stream, entry, f"{type(error).__name__}: {error}")


async def _awaited(done: Awaitable[None] | None) -> None:
    if done is not None:
        await done
