"""Vandals, which put hostile values into every key of a Redis that services use."""

from collections.abc import Awaitable, Callable

import msgspec

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.seals import Seals
from tests.redis_keys import (
    ATOMS,
    DEAD_LETTERS,
    KEYS,
    OTHER_KINDS,
    Key,
    changed,
    contents,
    key_of,
    parts_of,
    paths,
    plain_values,
)

Vandal = Callable[[Bus, int], Awaitable[bool]]
"""Puts the values of one number into every key; False if there are no more."""


async def places(bus: Bus) -> list[tuple[Key, str]]:
    """Name every key of the table, and all that there are of those that begin alike."""
    prefix = bus.connection.key("")
    found = {name.decode().removeprefix(prefix) for name in await bus.connection.client.keys()}
    found |= {key.written for key in KEYS}
    known = ((key_of(name), name) for name in sorted(found) if not name.startswith(DEAD_LETTERS))
    return [(key, name) for key, name in known if key is not None]


async def put(bus: Bus, key: Key, name: str, value: bytes) -> None:
    """Put a value where readers look."""
    name = bus.connection.key(name)
    if key.kind == "stream":
        await bus.connection.client.xadd(name, {"t": "x", "p": value})
    elif key.kind == "set":
        await bus.connection.client.sadd(name, value)
    else:
        await bus.connection.client.set(name, value)


async def all_plain(bus: Bus, number: int) -> bool:
    """Values that nobody of the cluster sealed."""
    more = False
    for key, name in await places(bus):
        values = plain_values(name, bus.connection.seals, Seals(b"another secret", "test"))
        if more := number < len(values):
            await put(bus, key, name, values[number])
    return more


async def all_sealed(bus: Bus, number: int) -> bool:
    """Contents below a good seal, of which most are no messages of this kind."""
    for key, name in await places(bus):
        of_key = [content for each in key.messages for content in contents(each)]
        if of_key:
            content = of_key[number % len(of_key)]
            await put(bus, key, name, bus.connection.seals.seal(name, content))
    return number < 24


async def all_changed(bus: Bus, number: int) -> bool:
    """Messages of the right kind of which one part is another one: some can be read, and make no sense."""
    for key, name in await places(bus):
        for each in key.messages:
            parts = parts_of(each)
            choices = [(path, atom) for path in paths(parts) for atom in ATOMS]
            path, atom = choices[(number * 7919) % len(choices)]
            content = msgspec.msgpack.encode(changed(parts, path, atom))
            await put(bus, key, name, bus.connection.seals.seal(name, content))
    return number < 100


async def all_of_other_kinds(bus: Bus, number: int) -> bool:
    """Values of another type, as a list where a string is expected."""
    command, *arguments = OTHER_KINDS[number]
    for _, name in await places(bus):
        name = bus.connection.key(name)
        # At once: a service may write the key as soon as it is gone.
        async with bus.connection.client.pipeline(transaction=True) as both:
            both.delete(name)
            both.execute_command(command, name, *arguments)
            await both.execute()
    return number + 1 < len(OTHER_KINDS)


VANDALS: tuple[Vandal, ...] = (all_plain, all_sealed, all_changed, all_of_other_kinds)
