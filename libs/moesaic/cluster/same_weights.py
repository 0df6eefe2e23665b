"""Agreement on weights: a worker with other weights than the cluster's does not join."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import structlog

from moesaic.cluster.background import tended
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import LEASE_S, RENEW_S
from moesaic.errors import PeerLost
from moesaic.messages.registry import Weights

log = structlog.get_logger()

_KEY = "weights"  # the cluster's weights; expires after the last worker's end
_LOOK_AGAIN_S = 0.5

_weights = msgspec.msgpack.Decoder(Weights)


@asynccontextmanager
async def same_weights(
    bus: Bus,
    own: Weights,
    waiting_for: list[str],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[None]:
    """Join the cluster with these weights, and stay for the length of the block.

    The first worker decides the cluster's weights, for as long as any worker has them. A worker with
    other weights waits before the block, until a lease has passed since the last of those workers.

    Args:
        bus: bus of the cluster.
        own: weights of this worker.
        waiting_for: a list for people, such as ``ServiceStatus.waiting_for``.
        clock: monotonic seconds.
    """
    await _join(bus, own, waiting_for, clock)
    async with tended(partial(_stay, bus, own), "weights"):
        yield


async def _join(bus: Bus, own: Weights, waiting_for: list[str], clock: Callable[[], float]) -> None:
    said, free_since_s = "", float("-inf")

    def say(text: str) -> None:
        nonlocal said
        waiting_for[:] = [other for other in waiting_for if other != said] + [text] * bool(text)
        said = text

    while True:
        may_be_first = clock() > free_since_s + LEASE_S
        try:
            held = await _claim(bus, own, may_be_first=may_be_first)
        except PeerLost as error:  # Redis is away, or does not let this worker do it
            held = None
            if said != str(error):
                say(str(error))
                log.warning("service.waiting", waiting_for=said)
        unlike = held.unlike(own) if held else ""
        if held is not None and not unlike:
            break
        # An empty place proves nothing: its holders may have lost Redis.
        if held is not None:
            free_since_s = clock()
            text = f"the weights of this cluster: {unlike}"
            if said != text:
                say(text)
                log.error("worker.other_weights", **_both(own, held), cause=unlike)
        await asyncio.sleep(_LOOK_AGAIN_S)
    say("")


async def _stay(bus: Bus, own: Weights) -> None:
    agreed = True
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(PeerLost):
            held = await _claim(bus, own, may_be_first=True)
            unlike = held.unlike(own) if held else ""
            if held and agreed and unlike:
                log.error("cluster.other_weights", **_both(own, held), cause=unlike)
            agreed = not unlike


def _both(own: Weights, held: Weights) -> dict[str, str]:
    return {"own_digest": own.digest, "cluster_digest": held.digest}


async def _claim(bus: Bus, own: Weights, *, may_be_first: bool) -> Weights | None:
    """Hold the place for another lease, if it is ours, or empty and ``may_be_first``.

    A value without the cluster's seal counts as an empty place.

    Returns:
        The weights that hold the place; None if it is empty.

    Raises:
        PeerLost: Redis did not do it.
    """
    stored = await bus.get_content(_KEY, _weights)
    held = stored.message
    if not held.unlike(own) if held else may_be_first:
        mine = bus.sealed(_KEY, own)
        if await bus.compare_and_set({_KEY: stored.value}, {_KEY: mine}, ttl_s=LEASE_S):
            return own
        # Another worker was faster, with these weights or others.
        held = await bus.get(_KEY, _weights)
    return held
