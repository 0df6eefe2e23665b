"""One model a cluster: a worker with other weights does not join."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from moesaic.cluster.background import background
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.registry import LEASE_S, RENEW_S
from moesaic.errors import PeerLost
from moesaic.messages.registry import Weights

log = structlog.get_logger()

_KEY = "weights"  # the digest of the cluster's weights; expires after the last worker's end
_LOOK_AGAIN_S = 0.5

_weights = msgspec.msgpack.Decoder(Weights)


@asynccontextmanager
async def same_weights(bus: Bus, digest: str, waiting_for: list[str]) -> AsyncIterator[None]:
    """Join the cluster with these weights, and stay for the length of the block.

    The first worker decides the cluster's weights, for as long as any worker has them. A worker with
    other weights waits before the block until a lease after the last of those workers has ended.

    Args:
        bus: of the cluster.
        digest: of this worker's configuration and weights.
        waiting_for: a list for people, such as ``ServiceStatus.waiting_for``.
    """
    await _join(bus, digest, waiting_for)
    async with background(_stay(bus, digest), "weights"):
        yield


async def _join(bus: Bus, digest: str, waiting_for: list[str]) -> None:
    said, free_since_s = "", float("-inf")

    def say(text: str) -> None:
        nonlocal said
        waiting_for[:] = [other for other in waiting_for if other != said] + [text] * bool(text)
        said = text

    while True:
        may_be_first = time.monotonic() > free_since_s + LEASE_S
        try:
            held = await _claim(bus, digest, may_be_first=may_be_first)
        except PeerLost as error:  # Redis is away, or does not let this worker do it
            held = None
            if said != str(error):
                say(str(error))
                log.warning("service.waiting", waiting_for=said)
        if held == digest:
            break
        if held is not None:  # an empty place proves nothing: its holders may have lost Redis
            free_since_s = time.monotonic()
            text = f"the weights of this cluster: theirs have digest {held[:16]}, this worker's {digest[:16]}"
            if said != text:
                say(text)
                log.error("worker.other_weights", own_digest=digest, cluster_digest=held)
        await asyncio.sleep(_LOOK_AGAIN_S)
    say("")


async def _stay(bus: Bus, digest: str) -> None:
    agreed = True
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(PeerLost):
            held = await _claim(bus, digest, may_be_first=True)
            if agreed and held not in (digest, None):
                log.error("cluster.other_weights", own_digest=digest, cluster_digest=held)
            agreed = held in (digest, None)


async def _claim(bus: Bus, digest: str, *, may_be_first: bool) -> str | None:
    """Hold the place for another lease, if it is ours, or empty and ``may_be_first``.

    A value without the cluster's seal counts as an empty place.

    Returns:
        The digest that holds the place; None if it is empty.

    Raises:
        PeerLost: Redis did not do it.
    """
    stored = await bus.get_bytes(_KEY)
    held = bus.opened(_KEY, stored, _weights)
    if held.digest == digest if held else may_be_first:
        mine = bus.sealed(_KEY, Weights(digest=digest))
        if await bus.compare_and_set({_KEY: stored}, {_KEY: mine}, ttl_s=LEASE_S):
            return digest
        # Another worker was faster, with these weights or others.
        held = bus.opened(_KEY, await bus.get_bytes(_KEY), _weights)
    return held.digest if held else None
