"""One cluster computes with one model: whose weights are others does not join."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.registry import LEASE_S, RENEW_S
from moesaic.errors import PeerLost

log = structlog.get_logger()

_KEY = "weights"  # the digest that workers join with; goes when the last of them has gone
_LOOK_AGAIN_S = 0.5


@asynccontextmanager
async def same_weights(bus: Bus, digest: str, waiting_for: list[str]) -> AsyncIterator[None]:
    """Join the cluster with these weights, and stay for the length of the block.

    The first worker to come says which weights the cluster has, as long as any worker has them. One
    with others waits before the block, and says so, until a lease after the last of those has gone.

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
    while True:
        held = await _claim(bus, digest, may_be_first=time.monotonic() > free_since_s + LEASE_S)
        if held == digest:
            break
        if held is not None:  # of an empty place nothing is known: its holders may have lost Redis
            free_since_s = time.monotonic()
            text = f"the weights of this cluster: theirs have digest {held[:16]}, this worker's {digest[:16]}"
            if text != said:
                waiting_for[:] = [*(other for other in waiting_for if other != said), text]
                said = text
                log.error("worker.other_weights", own_digest=digest, cluster_digest=held)
        await asyncio.sleep(_LOOK_AGAIN_S)
    if said in waiting_for:
        waiting_for.remove(said)


async def _stay(bus: Bus, digest: str) -> None:
    agreed = True
    while True:
        await asyncio.sleep(RENEW_S)
        held = await _claim(bus, digest, may_be_first=True)
        if agreed and held not in (digest, None):
            log.error("cluster.other_weights", own_digest=digest, cluster_digest=held)
        agreed = held in (digest, None)


async def _claim(bus: Bus, digest: str, *, may_be_first: bool) -> str | None:
    """Hold the place for another lease, if it is ours or may be; returns whose it is, if that is known."""
    mine = digest.encode()
    try:
        stored = await bus.get_bytes(_KEY)
        if stored == mine or (stored is None and may_be_first):
            if await bus.compare_and_set({_KEY: stored}, {_KEY: mine}, ttl_s=LEASE_S):
                return digest
            stored = await bus.get_bytes(_KEY)  # somebody was faster, with these weights or others
    except PeerLost:
        return None
    return None if stored is None else stored.decode(errors="replace")
